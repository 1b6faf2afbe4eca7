"""Hashed attention by every kind of kernels, against the dense truth: outputs, states and all gradients."""

from __future__ import annotations

import os

import pytest
import torch
from calls import DTYPES, FLAGS, make_call, results

from ecoformer import affinity as affinities
from ecoformer import hash_attention, pack_codes, reference, use_kernels
from ecoformer.ops import cpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Then kernels in Triton run on the CPU: `test_triton.py` starts such a process."""
if INTERPRETED:
    KERNELS = ["triton-fp32", "triton-fp16"]  # the interpreter cuts bf16 off instead of rounding
else:
    KERNELS = ["eager-fp64", "eager-fp32", "eager-bf16", "cpu-fp32", "cpu-bf16", "cpu-fp32-threads"]
ORDERS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
PLAIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""What errors of eager are below, relative to the size of a result."""


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    """Their name and a dtype; with two threads however little the work."""
    name, dtype, *threads = request.param.split("-")
    if name == "cpu" and cpu.library() is None:
        pytest.skip("the kernels were not built")
    if threads:
        monkeypatch.setattr(cpu, "LITTLE", 0)
        torch.set_num_threads(2)
    yield name, DTYPES[dtype]
    torch.set_num_threads(1)


def check(kernels, *sizes, **options):
    """Errors are at most twice eager's in the same dtype."""
    name, dtype = kernels
    call = make_call(*sizes, **options, dtype=dtype)
    truth, ours = results(call, None, torch.float64), results(call, name)
    near = ours if name == "eager" else results(call, "eager")
    for what, exact in truth.items():
        found, plain = ours[what], near[what]
        assert (found.shape, found.dtype) == (plain.shape, plain.dtype), what
        if not exact.numel():
            continue
        size = exact.norm().clamp_min(0.05 * exact.numel() ** 0.5)
        errors = [float((x.double() - exact).norm() / size) for x in (found, plain)]
        assert errors[1] <= PLAIN[dtype], (what, errors)
        assert errors[0] <= 2 * errors[1] + 1e-6, (what, errors)


@ORDERS
@pytest.mark.parametrize("flag", ["none", *FLAGS])
def test_each_option(flag, causal, kernels):
    check(kernels, 70, 90, flags={flag}, causal=causal)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("bits", [7, 16, 25, 64])
def test_groups_of_any_size(bits, size, kernels):
    """Most with a short last group; several options at once, drawn by the case."""
    generator = torch.Generator().manual_seed(100 * bits + size)
    flags = {flag for flag in FLAGS if torch.rand((), generator=generator) < 0.4}
    check(kernels, 9, 20, bits, size, 5, flags=flags, causal=bool(size % 2), batch=1, seed=bits)


@ORDERS
@pytest.mark.parametrize("d", [1, 5, 32, 64])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 130, 600])
def test_sizes(n, d, causal, kernels):
    flags = {"weighted", "state"} | ({"per_head"} if n % 2 else {"masked"})
    check(kernels, n, 33, 17, 4, d, flags=flags, causal=causal, batch=1)


@pytest.mark.parametrize("n_k", [0, 1, 600])
def test_cross_attention(n_k, kernels):
    check(kernels, 40, n_k, 10, 3, 20, flags={"weighted", "per_head", "state"})
    check(kernels, 0, n_k, 10, 3, 20, flags={"learned"})


@ORDERS
@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"d": 0}], ids=["batch", "heads", "channels"])
def test_nothing_to_compute(empty, causal, kernels):
    check(kernels, 5, 5, flags={"weighted", "learned"}, causal=causal, **empty)


def test_more_bits_than_an_integer_has():
    check(("eager", torch.float32), 40, 50, 70, 8, 5, flags={"weighted"})
    check(("cpu", torch.float32), 40, 40, 70, 8, 5, flags={"per_head"}, causal=True)  # eager runs


@ORDERS
def test_is_the_papers_equation(causal, kernels):
    """And that of groups, by the reference."""
    name, dtype = kernels
    call = make_call(70, dtype=dtype, flags={"masked"})
    codes, v = [reference.sign(call[x]).double() for x in "qk"], call["v"].double().nan_to_num()
    mask, beta, weight = call["key_padding_mask"], 0.3 + 0.6 * torch.rand(2, 4), 0.1 + torch.rand(2, 4)
    rest = {"key_padding_mask": mask[:, None], "is_causal": causal}
    grouped = reference.grouped_attention(*codes, v, 4, beta.double(), weight.double(), **rest)
    rest = {"key_padding_mask": mask, "is_causal": causal}
    tolerance = {"rtol": 0, "atol": 4e-6 if dtype.itemsize > 2 else 2e-2}
    with use_kernels(name):
        found = hash_attention(call["q"], call["k"], call["v"], affinities.grouped(beta, weight, 16), **rest)
        torch.testing.assert_close(found.double(), grouped, **tolerance)
        found = hash_attention(call["q"], call["k"], call["v"], **rest).double()
    torch.testing.assert_close(found, reference.hash_attention(*codes, v, mask[:, None], causal), **tolerance)


@ORDERS
@pytest.mark.parametrize("bits", [7, 16, 33])
def test_whole_numbers_are_exact(bits, causal, kernels):
    """The quotient of two whole numbers, divided once, bit for bit; of packed codes too."""
    name, dtype = kernels
    call = make_call(130, None, bits, dtype=dtype, flags={"masked"})
    q, k, mask = reference.sign(call["q"]).long(), reference.sign(call["k"]).long(), call["key_padding_mask"]
    v = torch.randint(-9, 10, call["v"].shape)
    seen = (~mask)[:, None, None] * torch.ones(130, 130, dtype=torch.long)
    a = (q @ k.mT + reference.bias_of(bits)) * (seen.tril() if causal else seen)
    top, below = a @ v, a.sum(-1, keepdim=True)
    wide = torch.promote_types(dtype, torch.float32)
    exact = torch.where(below == 0, 0, top.to(wide) * (1 / below.clamp_min(1).to(wide))).to(dtype)
    options = {"key_padding_mask": mask, "is_causal": causal, "bits": bits}
    with use_kernels(name):
        found = hash_attention(call["q"], call["k"], v.to(dtype), **options)
        packed = hash_attention(pack_codes(call["q"]), pack_codes(call["k"]), v.to(dtype), **options)
    assert torch.equal(packed, found)
    assert torch.equal(found, exact)


def test_nobody_seen(kernels):
    """Queries that see no key read zero and give no gradient."""
    name, dtype = kernels
    call = make_call(9, dtype=dtype, batch=1)
    q, k, v = (call[x].requires_grad_() for x in "qkv")
    with use_kernels(name):
        for rest in (
            {"key_padding_mask": torch.ones(1, 9, dtype=torch.bool)},
            {"key_weight": torch.zeros(1, 2, 9)},
        ):
            for causal in (False, True):
                out = hash_attention(q, k, v, is_causal=causal, **rest)
                assert not out.any()
                gradients = torch.autograd.grad(out.sum(), (q, k, v))
                assert not any(x.any() for x in gradients)


def test_a_query_that_can_read_one_light_key_only(kernels):
    """A bit a group and beta = 1: opposite bits count nothing, however heavy the other key."""
    name, dtype = kernels
    f = affinities.grouped(1.0, 1.0, 1, 1)
    q, k = torch.tensor([[[[1.0]]]]).to(dtype), torch.tensor([[[[-1.0], [1.0]]]]).to(dtype)
    v, weight = torch.tensor([[[[0.0], [1.0]]]]).to(dtype), torch.tensor([[[4097.3, 1e-4]]])
    with use_kernels(name):
        out = hash_attention(q, k, v, f, key_weight=weight)
        assert out.item() == pytest.approx(1, rel=1e-6)
        both = torch.cat([-q, q], 2)
        assert hash_attention(both, k, v, f, key_weight=weight, is_causal=True)[
            0, 0, 1
        ].item() == pytest.approx(1)


@pytest.mark.skipif(INTERPRETED, reason="a million keys take the interpreter long")
@ORDERS
@pytest.mark.parametrize("size", [1, 4])
def test_one_match_among_a_million_keys(size, causal, kernels):
    name, dtype = kernels
    n, f = 1_000_000, affinities.grouped(1.0, 1.0, size, size)
    k = -torch.ones(1, 1, n, size, dtype=dtype)
    k[0, 0, 4321] = 1
    v = torch.randn(1, 1, n, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = -k if causal else k[:, :, 4321:4322]
    with use_kernels(name):
        out = hash_attention(q, k, v, f, is_causal=causal)[0, 0, -1].item()
    assert out == pytest.approx(v[0, 0, 4321].item(), rel=1e-5)


@ORDERS
def test_counting_does_not_stop(causal, kernels):
    """A state holds more keys than fp32 counts one by one."""
    name, dtype = kernels
    many, q, v = 2.0**24, torch.ones(1, 1, 3, 4, dtype=dtype), torch.ones(1, 1, 3, 2, dtype=dtype)
    state = torch.zeros(1, 1, 16, 3, dtype=torch.float64)
    state[0, 0, 15] = torch.tensor([-many, many, many])
    with use_kernels(name):
        for _ in range(5):
            out, state = hash_attention(q, q, v, is_causal=causal, state=state, return_state=True)
    assert state[0, 0, 15].tolist() == [15 - many, 15 + many, 15 + many]
    assert state[0, 0, :15].eq(0).all()
    torch.testing.assert_close(
        out[0, 0, -1].double(), torch.tensor([-1.0, 1.0]).double(), rtol=1e-6, atol=1e-6
    )


def test_a_stream_is_causal_attention(kernels):
    name, dtype = kernels
    call = make_call(40, flags={"weighted", "per_head"}, dtype=dtype, causal=True)
    tokens, weight, f = [call[x] for x in "qkv"], call["key_weight"], call["affinity"]
    state, read = None, []
    with use_kernels(name):
        for part in (slice(0, 1), slice(1, 9), slice(9, 9), slice(9, 40)):
            mine = [x[:, :, part] for x in tokens]
            options = {"key_weight": weight[..., part], "is_causal": True, "state": state}
            out, state = hash_attention(*mine, f, **options, return_state=True)
            read.append(out)
        whole, after = hash_attention(*tokens, f, key_weight=weight, is_causal=True, return_state=True)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(torch.cat(read, 2), whole, **tolerance)
    torch.testing.assert_close(state, after, rtol=1e-5, atol=1e-5)
    assert state.dtype == torch.float64


@ORDERS
def test_any_layout_in_memory(causal, kernels):
    """Strides of every kind in, (B, N, H, D) out."""
    name, dtype = kernels
    call = make_call(33, d=6, dtype=dtype, flags={"weighted"}, causal=causal)
    q, k, v, weight = (call[x] for x in ("q", "k", "v", "key_weight"))
    backwards = lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)  # noqa: E731
    strided = torch.zeros(2, 2, 33, 12, dtype=dtype)[..., ::2].copy_(v)
    shared = torch.ones(1, 1, 1, 1, dtype=dtype)

    def outputs(q, k, v, weight, grad):
        leaves = [x.requires_grad_() for x in (q, k, v, weight)]
        out = hash_attention(*leaves[:3], key_weight=leaves[3], is_causal=causal)
        return out, *torch.autograd.grad(out, leaves, grad)

    with use_kernels(name):
        expected = outputs(*(x.contiguous() for x in (q, k, v, weight)), torch.ones_like(v).contiguous())
        turned = weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        found = outputs(backwards(q), backwards(k), strided, turned, shared.expand_as(v))
        for ours, same in zip(found, expected, strict=True):
            assert torch.equal(ours, same)
        assert found[0].transpose(1, 2).is_contiguous()


@ORDERS
class TestNan:
    """What is padded may hold anything (the `weighted` and `masked` calls above have NaN there too)."""

    @pytest.mark.parametrize("junk", [torch.nan, torch.inf])
    @pytest.mark.parametrize("flags", [{"masked"}, {"masked", "weighted"}], ids=["masked", "weighted"])
    def test_padding_is_never_read(self, junk, flags, causal, kernels):
        name, dtype = kernels
        dirty = make_call(70, flags=flags, dtype=dtype, causal=causal)
        weight = torch.ones(2, 2, 70) if dirty["key_weight"] is None else dirty["key_weight"]
        holes = (weight == 0) | dirty["key_padding_mask"][:, None]
        clean = dict(dirty)
        for what, plain in (("k", 1.0), ("v", 0.0)):
            dirty[what], clean[what] = (dirty[what].masked_fill(holes[..., None], x) for x in (junk, plain))
        if "weighted" in flags:
            dirty["key_weight"] = weight.masked_fill(dirty["key_padding_mask"][:, None], junk)
        found, expected = results(dirty, name), results(clean, name)
        for what, x in found.items():
            torch.testing.assert_close(x, expected[what], msg=what)
        for what in found.keys() & {"gradient of k", "gradient of v", "gradient of key_weight"}:
            assert not found[what][holes].any()

    @pytest.mark.parametrize("where", ["v", "key_weight", "state"])
    def test_it_stays_in_its_sample_and_is_not_hidden(self, where, causal, kernels):
        name, dtype = kernels
        clean = make_call(70, flags={"state", "per_head", "weighted"}, dtype=dtype, causal=causal, batch=3)
        clean["v"], clean["key_weight"] = clean["v"].nan_to_num(), clean["key_weight"] + 0.1
        dirty = clean | {where: clean[where].clone()}
        dirty[where][1, 0, 3] = torch.nan
        found, expected = results(dirty, name), results(clean, name)
        read = found["out"][1, 0, 3:]
        assert read.isnan().any() if where == "state" else read.isnan().all()
        torch.testing.assert_close(found["out"][1, 1], expected["out"][1, 1])
        others = torch.tensor([True, False, True])
        for what in found.keys() - {"gradient of affinity"}:
            torch.testing.assert_close(found[what][others], expected[what][others], msg=what)


@pytest.mark.skipif(INTERPRETED, reason="about kernels in C")
class TestKernelsInC:
    def test_where_they_were_not_built_eager_runs(self, monkeypatch):
        monkeypatch.setattr(cpu, "library", lambda: None)
        assert "install a C compiler" in cpu.unavailable(torch.device("cpu"))
        assert "not for cuda" in cpu.unavailable(torch.device("cuda"))
        call = make_call(9)
        with use_kernels("cpu"):
            found = hash_attention(call["q"], call["k"], call["v"])
        with use_kernels("eager"):
            assert torch.equal(found, hash_attention(call["q"], call["k"], call["v"]))

    @ORDERS
    def test_without_openmp_and_the_same_bits_every_time(self, causal, monkeypatch):
        """One thread then does the work of all."""
        monkeypatch.setattr(cpu, "LITTLE", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        call = make_call(600, flags={"weighted", "learned", "state"}, causal=causal, batch=1, heads=1)
        first, second = results(call, "cpu"), results(call, "cpu")
        monkeypatch.setattr(cpu, "_parallel", lambda: None)
        alone = results(call, "cpu")
        for name, x in first.items():
            assert torch.equal(x, second[name]), name
            torch.testing.assert_close(x, alone[name], msg=name)
