"""Tokens split over two processes give the single-process result and gradients, by one small message."""

from __future__ import annotations

import datetime
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ecoformer import hash_attention, pack_codes

WORLD, N, BITS, DIM = 2, 70, 16, 5
CASES = {
    f"{'causal' if is_causal else 'full'}-{bias}-{'masked' if masked else 'bare'}-{cut}": (
        {"is_causal": is_causal, "bias": bias},
        masked,
        cut,
    )
    # The first rank has most tokens, few or all of them.
    for is_causal, bias, masked, cut in product([False, True], ["paper", "tight"], [False, True], [65, 3, N])
}


def whole_sequence(masked):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(0, 2, (2, 3, N, BITS), generator=generator).mul(2).sub(1).double() for _ in "qk")
    v, weight = (torch.randn(2, 3, N, DIM, generator=generator, dtype=torch.float64) for _ in "vw")
    mask = torch.rand(2, N, generator=generator) < 0.4 if masked else None
    if masked:
        mask[0] = True
        mask[1, :10] = True
    return q, k, v, weight, mask


def outputs_and_gradients(q, k, v, weight, mask, process_group=None, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = hash_attention(*leaves, key_padding_mask=mask, process_group=process_group, **options)
    gradients = torch.autograd.grad((out * weight).sum(), leaves)
    packed = hash_attention(
        pack_codes(q), pack_codes(k), v, key_padding_mask=mask, process_group=process_group, **options
    )
    return [out.detach(), packed, *gradients]


def worker(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    group, sizes, all_reduce = dist.group.WORLD, [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    results = {}
    for name, (options, masked, cut) in CASES.items():
        mine = slice(0, cut) if rank == 0 else slice(cut, N)
        *tensors, mask = whole_sequence(masked)
        part = [x[:, :, mine] for x in tensors]
        results[name] = outputs_and_gradients(
            *part, None if mask is None else mask[:, mine], group, **options
        )

    q, k, v, _, _ = whole_sequence(False)
    queries, keys = (slice(0, 4), slice(0, 60)) if rank == 0 else (slice(4, 5), slice(60, N))
    results["cross"] = hash_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], process_group=group)
    dist.all_reduce = counted
    for is_causal in (False, True):
        hash_attention(q, k, v, is_causal=is_causal, process_group=group)
    results["messages"] = sizes
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_split_tokens_give_the_single_process_result(name, ranks):
    options, masked, _ = CASES[name]
    expected = outputs_and_gradients(*whole_sequence(masked), **options)
    for what, whole, *parts in zip(
        ("out", "packed", "codes_q", "codes_k", "v"), expected, *(r[name] for r in ranks), strict=True
    ):
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-10, atol=1e-12, msg=what)
    assert masked == bool(expected[0][0].eq(0).all())


def test_cross_attention_over_split_keys(ranks):
    q, k, v, _, _ = whole_sequence(False)
    expected = hash_attention(q[:, :, :5], k, v)
    torch.testing.assert_close(torch.cat([r["cross"] for r in ranks], dim=2), expected)


def test_one_small_message_whatever_the_number_of_tokens(ranks):
    state = 2 * 3 * (BITS + 1) * (DIM + 1)
    for rank in ranks:
        assert rank["messages"] == [state, WORLD * state]
