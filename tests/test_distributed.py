"""Tokens split over two processes give the single-process result and gradients, by one small message."""

from __future__ import annotations

import datetime
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ecoformer import affinity, hash_attention, pack_codes

WORLD, N, BITS, DIM = 2, 70, 14, 5
CASES = {
    f"{'causal' if is_causal else 'full'}-{kind}-{cut}": (is_causal, kind, cut)
    # The first rank has most tokens, few or all of them.
    for is_causal, kind, cut in product([False, True], ["plain", "masked", "state"], [65, 3, N])
}
SPLIT = ("out", "packed", "q", "k", "v", "key_weight")
SUMMED = ("affinity", "state")
"""Gradients of what all ranks hold: each has its part."""


def whole_sequence(kind):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v, grad = draw(2, 3, N, BITS), draw(2, 3, N, BITS), draw(2, 3, N, DIM), draw(2, 3, N, DIM)
    weight, mask, state = draw(2, 3, N).exp(), torch.zeros(2, N, dtype=torch.bool), None
    f = affinity.grouped(
        torch.rand(3, 4, generator=generator), 0.5 + torch.rand(3, 4, generator=generator), BITS
    ).double()
    if kind == "masked":
        mask = torch.rand(2, N, generator=generator) < 0.4
        mask[0] = True
        mask[1, :10] = True
    if kind == "state":
        _, state = hash_attention(q, k, draw(2, 3, N, DIM), f, return_state=True)
    return [q, k, v, weight, mask, grad], f, state


def outputs_and_gradients(part, f, state, is_causal, process_group=None):
    q, k, v, weight, mask, grad = part
    leaves = [x.clone().requires_grad_() for x in (q, k, v, weight, f, *([] if state is None else [state]))]
    options = {"key_padding_mask": mask, "is_causal": is_causal, "process_group": process_group}
    to_read = {"key_weight": leaves[3], "state": None if state is None else leaves[5]}
    out, after = hash_attention(*leaves[:3], leaves[4], **to_read, return_state=True, **options)
    gradients = torch.autograd.grad((out * grad).sum(), leaves)
    codes = pack_codes(q), pack_codes(k)
    packed = hash_attention(*codes, v, f, key_weight=weight, state=state, bits=BITS, **options)
    results = dict(zip((*SPLIT, *SUMMED), (out.detach(), packed, *gradients), strict=False))
    return results | {"after": after.detach()}


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
    for name, (is_causal, kind, cut) in CASES.items():
        mine = slice(0, cut) if rank == 0 else slice(cut, N)
        tensors, f, state = whole_sequence(kind)
        part = [x[:, mine] if x.dtype == torch.bool else x[:, :, mine] for x in tensors]
        results[name] = outputs_and_gradients(part, f, state, is_causal, group)

    (q, k, v, *_), f, _ = whole_sequence("plain")
    queries, keys = (slice(0, 4), slice(0, 60)) if rank == 0 else (slice(4, 5), slice(60, N))
    results["cross"] = hash_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], f, process_group=group)
    dist.all_reduce = counted
    for is_causal in (False, True):
        hash_attention(q, k, v, f, is_causal=is_causal, process_group=group)
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
    is_causal, kind, _ = CASES[name]
    expected = outputs_and_gradients(*whole_sequence(kind), is_causal)
    found = [rank[name] for rank in ranks]
    for what, whole in expected.items():
        parts = [x[what] for x in found]
        joined = torch.cat(parts, dim=2) if what in SPLIT else parts[0] + parts[1]
        if what == "after":
            assert torch.equal(*parts)
            joined = parts[0]
        torch.testing.assert_close(joined, whole, rtol=1e-10, atol=1e-12, msg=what)
    assert (kind == "masked") == bool(expected["out"][0].eq(0).all())


def test_cross_attention_over_split_keys(ranks):
    (q, k, v, *_), f, _ = whole_sequence("plain")
    expected = hash_attention(q[:, :, :5], k, v, f)
    torch.testing.assert_close(torch.cat([r["cross"] for r in ranks], dim=2), expected)


def test_one_small_message_whatever_the_number_of_tokens(ranks):
    rows = 2 * 3 * 4 * 16 * (DIM + 1)
    for rank in ranks:
        assert rank["messages"] == [WORLD * rows] * 2
