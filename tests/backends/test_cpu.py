"""The CPU kernels against the reference, over sizes that break kernels."""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import pytest
import torch
from calls import make_call, truth

from ecoformer.backends import cpu, fused
from ecoformer.backends.cpu import threads as team
from ecoformer.backends.hashing import HashFunctions

pytest.importorskip("numba")

CLOSE = {"rtol": 1e-4, "atol": 2e-6}
SIZES = [
    {"n": 1},
    {"n": 1, "dim": 40, "bits": 1, "samples": 1},
    {"n": 63, "dim": 40, "bits": 33, "samples": 64},
    {"n": 63, "dim": 96, "bits": 8},
    {"n": 500, "bits": 64, "samples": 1},
    {"n": 500, "dim": 96, "bits": 16, "samples": 64},
    {"n": 1100, "dim": 40, "bits": 5},
    {"n": 1100, "dim": 33, "bits": 33},
    {"n": 3137, "dim": 40, "bits": 16, "batch": 1},
    {"n": 3137, "dim": 16, "bits": 8, "batch": 1, "heads": 1},
    {"n": 600, "dim": 7, "channels": 50, "bits": 13},
    {"n": 1030, "queries": 77, "channels": 24, "bits": 33},
    {"n": 1, "queries": 700},
    {"n": 600, "planes": True, "bits": 16},
    {"n": 63, "planes": True, "bits": 40, "dim": 19, "queries": 5},
]
EVERY_SIZE = pytest.mark.parametrize("size", SIZES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))


@pytest.fixture(params=["one", "three", "three of Python"])
def threads(request, monkeypatch):
    if request.param == "three of Python":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    torch.set_num_threads(1 if request.param == "one" else 3)
    yield torch.get_num_threads()
    torch.set_num_threads(1)


def run(call: fused.Call) -> torch.Tensor:
    assert cpu.cannot(call, needs_grad=False) is None
    return cpu.forward(call)[0]


@pytest.mark.parametrize("masked", [False, True], ids=["bare", "masked"])
@EVERY_SIZE
def test_equals_the_reference(size, masked, threads):
    if masked and threads == 1 and size["n"] > 3000:
        pytest.skip("covered by three threads")
    call = make_call(**size, masked=masked)
    torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


@pytest.mark.parametrize("masked", [False, True], ids=["bare", "masked"])
@pytest.mark.parametrize("size", [s for s in SIZES if "queries" not in s], ids=str)
def test_equals_the_reference_in_causal_order(size, masked):
    call = make_call(**size, masked=masked, causal=True)
    torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


GROUPED = [
    {"groups": 4},
    {"groups": 2},
    {"groups": 16},
    {"groups": 5, "bits": 15},
    {"groups": 3, "bits": 18, "dim": 20, "channels": 5},
    {"groups": 4, "planes": True},
    {"groups": 4, "beta": (1.0, 1.0)},
    {},
]


@pytest.mark.parametrize("n", [1, 63, 1030])
@pytest.mark.parametrize("size", GROUPED, ids=str)
def test_groups_weights_and_hash_functions_of_keys(size, n, threads):
    options = [
        {"masked": True, "weighted": True},
        {"apart": True, "weighted": True},
        {"queries": 40, "apart": True, "masked": True},
    ]
    options += [option | {"causal": True} for option in options[:2]]
    if n > 1000:  # digits of eight bits; one head, for the reference is dense
        size = {**size, "batch": 1, "heads": 1}
    for option in options:
        call = make_call(n, **size, **option)
        torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_groups_are_exact_for_integers(causal, threads):
    # beta 1 and weight 1: affinities are multiples of 16, sums of integers are integers.
    call = make_call(1030, groups=4, whole=True, causal=causal, batch=1, heads=1)
    scale, ratio = torch.full_like(call.scale, 16.0), torch.zeros_like(call.ratio)
    call = call._replace(scale=scale, ratio=ratio)
    assert torch.equal(run(call), truth(call).float())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("bits", "groups"), [(16, 4), (12, 3), (64, 8), (5, None)])
def test_projections(bits, groups, causal, threads):
    options = {"signs": True, "bits": bits, "groups": groups, "channels": 20, "weighted": True, "batch": 1}
    for n, more in ((70, {"masked": True}), (1030, {"heads": 1}), (63, {"queries": 63})):
        call = make_call(n, **options | more, causal=causal)
        torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


def test_causal_cross_attention():
    call = make_call(130, queries=130, masked=True, causal=True)
    torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@EVERY_SIZE
def test_integers_are_exact(size, causal, threads):
    if causal and "queries" in size:
        pytest.skip("causal order has as many queries as keys")
    call = make_call(**size, masked=True, whole=True, causal=causal)
    # Numerators and denominators are exact in fp64 and fp32, so that both round the same quotient.
    assert torch.equal(run(call), truth(call).float())


def test_long_sums_are_no_worse_than_eager():
    call = make_call(20000, batch=1, heads=1)
    call = call._replace(v=call.v + 3)
    for causal in (False, True):
        call = call._replace(causal=causal)
        wide = fused.plain(call._replace(v=call.v.double()))
        plain, ours = fused.plain(call), run(call)
        assert (ours - wide).norm() <= 2 * (plain - wide).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_precision_is_hashed_and_summed_in_fp32(dtype, causal):
    call = make_call(700, causal=causal)
    half = call._replace(q=call.q.to(dtype), v=call.v.to(dtype))
    out = run(half)
    assert out.dtype == dtype
    wide = run(half._replace(q=half.q.float(), v=half.v.float()))
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [None, 600], ids=["self", "cross"])
def test_any_strides_and_nothing_around_is_read(queries, causal, threads):
    call = make_call(600, dim=24, queries=queries, masked=True, causal=causal)
    expected = run(call)

    def embedded(x, order):
        """The same numbers inside of a larger buffer of NaN, with dimensions in another order in memory."""
        if x is None:
            return None
        sizes = [x.shape[i] + 3 for i in order]
        memory = torch.full(sizes, math.nan).permute(sorted(range(4), key=order.__getitem__))
        inner = memory[tuple(slice(1, 1 + n) for n in x.shape)]
        inner.copy_(x)
        return inner

    for order in ((0, 2, 1, 3), (3, 2, 1, 0), (2, 0, 1, 3)):
        mask = torch.ones(9, 5, 600).bool()
        mask[3:5, 2] = call.mask
        odd = call._replace(
            q=embedded(call.q, order),
            k=embedded(call.k, order),
            v=embedded(call.v, order),
            mask=mask[3:5, 2],
            functions=HashFunctions(*(x.mT.contiguous().mT if x.ndim > 1 else x for x in call.functions)),
        )
        assert torch.equal(run(odd), expected)


def test_nothing_around_the_output_is_written(monkeypatch):
    call = make_call(600, dim=24, batch=1, heads=1)
    memory = torch.full((1, 1, 606, 30), math.nan)
    from ecoformer.backends.cpu import launch

    monkeypatch.setattr(launch, "empty_out", lambda q, v: memory[:, :, 3:-3, 3:-3])
    run(call)
    inside = torch.zeros_like(memory, dtype=torch.bool)
    inside[:, :, 3:-3, 3:-3] = True
    assert memory[inside].isfinite().all()
    assert memory[~inside].isnan().all()


@EVERY_SIZE
def test_scratch_memory_is_as_large_as_it_says(size, monkeypatch):
    def fenced(wanted):
        memory = torch.full((wanted + 4096,), 0xAB, dtype=torch.uint8)
        fences.append((wanted, memory))
        return memory.data_ptr() + 2048

    fences = []
    monkeypatch.setattr(team, "scratch", fenced)
    for causal in (False, True):
        n = size["n"]
        more = {"causal": causal} | ({"queries": n} if causal and "queries" in size else {})
        run(make_call(**size | more))
    for wanted, memory in fences:
        assert (memory[:2048] == 0xAB).all()
        assert (memory[2048 + wanted :] == 0xAB).all()
        assert (memory[2048 : 2048 + wanted] != 0xAB).any()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("where", ["q", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_stays_in_its_head(value, where, causal, threads):
    call = make_call(600, whole=True, causal=causal)
    clean = run(call)
    broken = call._replace(**{where: getattr(call, where).clone()})
    getattr(broken, where)[1, 0, 7, 3] = value
    out = run(broken)
    if not (where == "v" and value == 1e30):  # the length of such a token overflows, but a value does not
        assert not out[1, 0, 7:].isfinite().all(dim=-1).any()
    out[1, 0] = clean[1, 0]
    assert torch.equal(out, clean)


def test_nan_of_a_query_or_of_padding_stays_its_own(threads):
    call = make_call(600, queries=40, whole=True)
    clean = run(call)
    call.q[0, 1, 5] = math.nan
    out = run(call)
    assert out[0, 1, 5].isnan().all()
    out[0, 1, 5] = clean[0, 1, 5]
    assert torch.equal(out, clean)
    mask = torch.zeros(2, 600, dtype=torch.bool)
    mask[0, 9] = True
    call = make_call(600, whole=True)._replace(mask=mask)
    clean = run(call)
    call.q[0, :, 9] = math.nan
    call.v[0, :, 9] = math.nan
    out = run(call)
    assert out[0, :, 9].isnan().all()
    out[0, :, 9] = clean[0, :, 9]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("planes", [False, True], ids=["kernel", "planes"])
def test_zero_tokens_hash_like_any_other(planes):
    call = make_call(100, whole=True, planes=planes)
    call.q[0, 0, 3] = 0
    call.q[1, :, 50:] = 0
    torch.testing.assert_close(run(call), truth(call).float(), **CLOSE)


def test_lengths_of_tokens_do_not_matter():
    call = make_call(200, whole=True)
    scales = torch.logspace(-12, 12, 200).view(1, 1, 200, 1)
    assert torch.equal(run(call), run(call._replace(q=call.q * scales)))


def test_repeated_runs_are_equal(threads):
    call = make_call(3137, heads=1, batch=1, masked=False)
    outs = [run(call) for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_threads_of_python_may_call_at_once(threads):
    calls = [make_call(400 + 37 * i, dim=16 + i, batch=1, heads=1, seed=i) for i in range(4)]
    expected = [run(call) for call in calls]
    failures = []

    def work(i):
        for _ in range(50):
            if not torch.equal(run(calls[i]), expected[i]):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@pytest.fixture
def teams(monkeypatch):
    """How many threads each call was given."""
    used = []
    original = team.run_team
    monkeypatch.setattr(team, "run_team", lambda *a: (used.append(a[2]), original(*a)))
    return used


def test_threads_are_as_many_as_pytorch_uses(teams):
    call = make_call(3000, batch=1, heads=1)
    run(call)
    assert teams == [1]
    torch.set_num_threads(3)
    try:
        run(call)
        assert teams[1:] == [3], "both passes over parts of the head"
        run(make_call(64, batch=1, heads=1))
        assert teams[2:] == [1], "too few tokens for a second thread"
        run(make_call(64, batch=2, heads=4))
        assert teams[3:] == [3]
    finally:
        torch.set_num_threads(1)


def test_threads_are_borrowed_from_pytorch():
    if "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux":
        pytest.skip("PyTorch has other threads here")
    assert team._openmp() is not None


def test_an_error_in_a_thread_is_raised():
    def work(data):
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        team.spread(work, 0, 2)


def test_exponential_is_as_good_as_fp32():
    numba = pytest.importorskip("numba")
    from ecoformer.backends.cpu.rows import kernel_row

    @numba.njit
    def exponentials(y, zeros):
        kernel_row(y, 0, zeros, 0, zeros, 0, len(y), np.float32(1), np.float32(0))

    x = np.linspace(-87, 0, 100_003, dtype=np.float32)
    y = x.copy()
    exponentials(y, np.zeros_like(y))
    true = np.array([math.exp(float(value)) for value in x])
    assert np.abs(y / true - 1).max() < 3e-7
    y = np.array([math.nan, -200, -math.inf, 0, 1] * 4, dtype=np.float32)
    exponentials(y, np.zeros_like(y))
    np.testing.assert_allclose(y, [math.nan, 0, 0, 1, 1] * 4, atol=1e-37)
