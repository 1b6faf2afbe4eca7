"""Which backend runs, what takes the way by single steps, and what PyTorch does to the one operator."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from calls import make_call

import ecoformer
from ecoformer import FitOptions, KernelHasher, LshHasher, eco_attention, hash_attention, use_backend
from ecoformer.backends import available, choice, cpu, fused

pytest.importorskip("numba")

QUICK = FitOptions(steps=5, pairs=5)
LIGHT = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture
def hasher():
    return KernelHasher(2, 8, 16, 5).fit(torch.randn(2, 2, 60, 8), options=QUICK)


@pytest.fixture
def tokens():
    return torch.randn(3, 2, 70, 8)


@pytest.fixture
def ran(monkeypatch, backend_variable):
    """The names of the fused backends that ran, in order."""
    seen = []
    original = fused._forward

    def spy(name, *arguments, **named):
        seen.append(name)
        return original(name, *arguments, **named)

    monkeypatch.setattr(fused, "_forward", spy)
    return seen


@pytest.fixture
def fresh_warnings():
    fused.warn_once.cache_clear()
    yield
    fused.warn_once.cache_clear()
    fused._broken.clear()


def by_steps(q, v, hasher, k=None, **options):
    mask = options.get("key_padding_mask")
    codes_k = hasher(q if k is None else k, mask)
    return hash_attention(codes_k if k is None else hasher(q), codes_k, v, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("make", [KernelHasher, ecoformer.KlshHasher, LshHasher])
def test_fused_equals_the_single_steps(make, cross, causal, ran):
    hasher = make(2, 8, 16).fit(torch.randn(2, 2, 60, 8), options=QUICK)
    q, v = torch.randn(3, 2, 70, 8), torch.randint(-4, 5, (3, 2, 70, 12)).float()
    k = torch.randn(3, 2, 70, 8) if cross else None
    options = {"key_padding_mask": torch.rand(3, 70) < 0.3, "is_causal": causal}
    out = eco_attention(q, v, hasher, k=k, **options)
    assert ran == ["cpu"]
    assert torch.equal(out, by_steps(q, v, hasher, k, **options))


def test_the_module_gives_the_same_by_both(ran):
    layer = ecoformer.EcoAttention(32, 4).eval().requires_grad_(False)
    layer.hasher.fit(torch.randn(2, 4, 60, 8), options=QUICK)
    x, mask = torch.randn(3, 65, 32), torch.rand(3, 65) < 0.3
    for bias in ("paper", "tight"):
        layer.bias = bias
        for options in ({}, {"key_padding_mask": mask}, {"is_causal": True}):
            ours = layer(x, **options)
            with use_backend("eager"):
                torch.testing.assert_close(ours, layer(x, **options))
    assert ran == ["cpu"] * 6


def test_what_is_not_covered_takes_the_single_steps(hasher, tokens, ran):
    eco_attention(tokens.double(), tokens.double(), copy.deepcopy(hasher).double())
    eco_attention(tokens, tokens, ecoformer.SignHasher(2, 8))
    assert ran == []


def test_gradients_take_the_kernels(hasher, tokens, ran):
    leaf = tokens.clone().requires_grad_()
    eco_attention(leaf, tokens, hasher).sum().backward()
    assert leaf.grad.abs().sum() > 0
    trained = KernelHasher(2, 8, 16, 5, trainable=True).fit(tokens, options=QUICK)
    eco_attention(tokens, tokens, trained).sum().backward()
    assert trained.weight.grad is not None
    with torch.no_grad():
        eco_attention(leaf, tokens, trained)
    assert ran == ["cpu"] * 3


def test_a_hasher_of_ones_own_is_called(tokens, ran):
    class Other(KernelHasher):
        def project(self, tokens):
            return -super().project(tokens)

    class Watching(KernelHasher):
        def forward(self, tokens, key_padding_mask=None):
            called.append(True)
            return super().forward(tokens, key_padding_mask)

    called = []
    for make in (Other, Watching):
        eco_attention(tokens, tokens, make(2, 8, 16, 5).fit(tokens, options=QUICK))
    assert called == [True]
    assert ran == []


def test_hooks_of_a_hasher_are_called(hasher, tokens, ran):
    called = []
    handles = [
        hasher.register_forward_pre_hook(lambda *_: called.append("before")),
        hasher.register_forward_hook(lambda *_: called.append("after")),
    ]
    eco_attention(tokens, tokens, hasher)
    assert called == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert ran == []
    eco_attention(tokens, tokens, hasher)
    assert ran == ["cpu"]


def test_fitting_reaches_the_hashers(ran):
    layer = ecoformer.EcoAttention(16, 2).eval()
    with pytest.warns(UserWarning, match="fit_hashers"), torch.no_grad():
        layer(torch.randn(2, 40, 16))
    ecoformer.fit_hashers(layer, [torch.randn(2, 40, 16)], options=QUICK, progress=False)
    assert bool(layer.hasher.fitted)
    with torch.no_grad():
        layer(torch.randn(2, 40, 16))
    assert ran == ["cpu", "cpu"]


def test_counting_sees_the_single_steps(ran):
    layer = ecoformer.EcoAttention(16, 2).eval()
    layer.hasher.fit(torch.randn(2, 2, 60, 8), options=QUICK)
    ledger = ecoformer.cost(layer, (2, 40, 16), accounting="exact")
    assert ran == []
    with use_backend("eager"):
        assert ledger == ecoformer.cost(layer, (2, 40, 16), accounting="exact")
    assert ledger.uncounted == ()


def test_transforms_see_the_single_steps(hasher, tokens, ran):
    def loss(q, v):
        return eco_attention(q[None], v[None], hasher).square().sum()

    leaf = tokens.clone().requires_grad_()
    expected = torch.autograd.grad(eco_attention(leaf, tokens, hasher).square().sum(), leaf)[0]
    found = torch.func.vmap(torch.func.grad(loss))(tokens, tokens)
    torch.testing.assert_close(found, expected)
    assert ran == ["cpu"], "outside of the transform alone"


def test_bad_arguments_get_the_same_errors(hasher, tokens):
    with pytest.raises(ValueError, match=r"tokens must be \(B, 2, N, 8\)"):
        eco_attention(tokens[..., :4], tokens, hasher)
    with pytest.raises(ValueError, match="same number of tokens"):
        eco_attention(tokens, tokens[:, :, :9], hasher)
    with pytest.raises(ValueError, match="key_padding_mask must be bool"):
        eco_attention(tokens, tokens, hasher, key_padding_mask=torch.zeros(3, 70))
    with pytest.raises(ValueError, match="as many queries as keys"):
        eco_attention(tokens[:, :, :9], tokens, hasher, k=tokens, is_causal=True)


@pytest.mark.parametrize(
    ("field", "shape"),
    [("sigma", (1,)), ("mean", (2, 3)), ("support_samples", (2, 25, 7)), ("weight", (2, 9, 16))],
)
def test_hash_functions_of_wrong_shapes_are_refused(field, shape, hasher, tokens):
    damaged = copy.deepcopy(hasher)
    setattr(damaged, field, torch.ones(shape))
    with pytest.raises(ValueError, match=r"hasher's support \(H, m, D\)") as caught:
        eco_attention(tokens, tokens, damaged)
    assert "\n" not in str(caught.value)


def test_lazy_minus_signs_are_seen(hasher, tokens, ran):
    negative = torch._neg_view(tokens)
    expected = eco_attention(-tokens, -tokens, hasher, k=-tokens.flip(2))
    found = eco_attention(negative, negative, hasher, k=torch._neg_view(tokens.flip(2)))
    assert ran == ["cpu", "cpu"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_what_is_not_finite_in_v_stays_in_its_channel_of_its_head(backend, is_causal, value, hasher, tokens):
    v = tokens.clone()
    clean = eco_attention(tokens, v, hasher, is_causal=is_causal, backend=backend)
    v[1, 0, 5:7, 3] = value  # twice, so that a sum of finite numbers overflows
    out = eco_attention(tokens, v, hasher, is_causal=is_causal, backend=backend)
    assert not out[1, 0, 7:, 3].isfinite().any()
    out[1, 0, :, 3] = clean[1, 0, :, 3]
    assert torch.equal(out, clean)


def test_available_says_what_is_preferred(monkeypatch):
    assert available("cpu") == ["cpu", "eager"]
    assert available(torch.device("meta")) == ["eager"]
    monkeypatch.setattr(cpu, "_installed", lambda: False)
    choice.why_not_on.cache_clear()
    assert available("cpu") == ["eager"]
    assert "pip install 'ecoformer[cpu]'" in choice.why_not_on("cpu", "cpu")
    choice.why_not_on.cache_clear()


def test_the_variable_decides(backend_variable, hasher, tokens, ran):
    backend_variable("eager")
    eco_attention(tokens, tokens, hasher)
    assert ran == []
    backend_variable("cpu")
    eco_attention(tokens, tokens, hasher)
    assert ran == ["cpu"]
    backend_variable("cuda")
    with pytest.raises(ValueError, match="ECOFORMER_BACKEND must be one of eager, cpu, triton, got 'cuda'"):
        eco_attention(tokens, tokens, hasher)
    with use_backend("eager"):
        eco_attention(tokens, tokens, hasher)


def test_a_block_or_an_argument_chooses_the_backend(hasher, tokens, ran):
    with use_backend("eager"):
        eco_attention(tokens, tokens, hasher)
        with use_backend("cpu"):
            eco_attention(tokens, tokens, hasher)
        eco_attention(tokens, tokens, hasher)
        assert ran == ["cpu"]
        eco_attention(tokens, tokens, hasher, backend="cpu")
        with use_backend(None):
            eco_attention(tokens, tokens, hasher)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(eco_attention, tokens, tokens, hasher).result()
    assert ran == ["cpu"] * 4
    eco_attention(tokens, tokens, hasher, backend="eager")
    assert ran == ["cpu"] * 4
    with pytest.raises(RuntimeError, match="inside"), use_backend("eager"):
        raise RuntimeError("inside")
    assert choice.requested() is None
    for call in (
        lambda: eco_attention(tokens, tokens, hasher, backend="cuda"),
        use_backend("cuda").__enter__,
    ):
        with pytest.raises(ValueError, match="backend must be one of eager, cpu, triton, got 'cuda'"):
            call()


def test_compiled_code_follows_the_choice(hasher, tokens, ran):
    def nested(q):
        with use_backend("eager"):
            return eco_attention(q, q, hasher)

    torch.compiler.reset()
    compiled = torch.compile(eco_attention, fullgraph=True, backend="aot_eager")
    expected = eco_attention(tokens, tokens, hasher, backend="eager")
    for name, runs in (("eager", []), ("cpu", ["cpu"]), ("eager", []), (None, ["cpu"])):
        ran.clear()
        with use_backend(name):
            torch.testing.assert_close(compiled(tokens, tokens, hasher), expected)
        assert ran == runs
    ran.clear()
    compiled(tokens, tokens, hasher, backend="eager")
    torch.compile(nested, fullgraph=True, backend="aot_eager")(tokens)
    assert ran == []
    assert choice.requested() is None


def test_a_backend_asked_for_in_vain_warns_once(monkeypatch, hasher, tokens, ran, fresh_warnings):
    monkeypatch.setattr(cpu, "_installed", lambda: False)
    with pytest.warns(UserWarning, match="backend 'cpu' is unavailable .numba is not"):
        out = eco_attention(tokens, tokens, hasher, backend="cpu")
    assert torch.equal(out, eco_attention(tokens, tokens, hasher, backend="cpu"))
    assert ran == []
    eco_attention(tokens, tokens, hasher)


def test_a_kernel_that_breaks_gives_way_with_one_warning(monkeypatch, hasher, tokens, fresh_warnings):
    def broken(*_, **__):
        raise fused.CannotRun("it has no such instruction")

    expected = by_steps(tokens, tokens, hasher)
    monkeypatch.setattr(cpu, "forward", broken)
    with pytest.warns(UserWarning, match="no such instruction"):
        out = eco_attention(tokens, tokens, hasher)
    torch.testing.assert_close(out, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(eco_attention(tokens, tokens, hasher), expected)


def test_numba_that_cannot_compile_gives_way(monkeypatch, hasher, tokens, fresh_warnings):
    monkeypatch.setitem(sys.modules, "ecoformer.backends.cpu.launch", None)
    cpu._compiled.cache_clear()
    with pytest.warns(UserWarning, match=r"numba cannot compile its kernels \(ModuleNotFoundError: "):
        eco_attention(tokens, tokens, hasher)
    cpu._compiled.cache_clear()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [None, 5], ids=["self", "cross"])
def test_opcheck(queries, causal):
    call = make_call(5, queries=queries, masked=True, causal=causal)
    torch.library.opcheck(torch.ops.ecoformer.eco_attention.default, (*call.flat(), "cpu"), test_utils=LIGHT)


class Fake:
    """A fused backend with a backward, in plain PyTorch."""

    saved = 0

    @staticmethod
    def cannot(*_, **__):
        return None

    @staticmethod
    def forward(call, keep=True):
        out = fused.empty_out(call.q, call.v)
        out.copy_(fused.plain(call))
        return out, Fake.kept(call)

    @staticmethod
    def kept(call):
        return [call.q.new_ones(call.q.shape[:-1])]

    @staticmethod
    def backward(call, grad, saved, needs):
        assert saved[0].shape == call.q.shape[:-1]
        Fake.saved += 1
        # Inside of an operator PyTorch records nothing, in another thread it does.
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(fused.plain_backward, call, grad, needs).result()
        return tuple(None if x is None else x.contiguous() for x in found)


@pytest.fixture
def fake(monkeypatch, backend_variable):
    original = fused._import
    monkeypatch.setattr(fused, "_import", lambda name: Fake if name == "cpu" else original(name))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_gradients_go_through_the_operator(cross, causal, hasher, tokens, fake):
    leaves = [torch.randn_like(tokens).requires_grad_() for _ in range(3)]
    q, v, k = leaves

    def gradients(backend_attention):
        out = backend_attention(q, v, hasher, k=k if cross else None, is_causal=causal)
        return torch.autograd.grad(out.square().sum(), leaves[: 3 if cross else 2])

    before = Fake.saved
    found = gradients(eco_attention)
    assert Fake.saved == before + 1
    torch.testing.assert_close(found, gradients(by_steps))


def test_opcheck_of_gradients(fake):
    for queries in (None, 5):
        call = make_call(5, queries=queries, masked=True)
        arguments = [x.requires_grad_() if i in (0, 1, 2) and x is not None else x
                     for i, x in enumerate((*call.flat(), "cpu"))]  # fmt: skip
        torch.library.opcheck(torch.ops.ecoformer.eco_attention.default, tuple(arguments))


def test_a_missing_gradient_is_no_silent_zero(fake, monkeypatch, tokens, hasher):
    monkeypatch.setattr(Fake, "backward", staticmethod(lambda *_: (None, None, None, None)))
    with pytest.raises(RuntimeError, match="gave no gradient for q"):
        eco_attention(tokens.requires_grad_(), tokens, hasher).sum().backward()


def test_a_backend_that_was_asked_for_says_that_it_takes_no_fp64(hasher, tokens, fresh_warnings):
    wide = copy.deepcopy(hasher).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eco_attention(tokens.double(), tokens.double(), wide)
    with pytest.warns(UserWarning, match="backend 'cpu' is unavailable .it takes fp32"):
        eco_attention(tokens.double(), tokens.double(), wide, backend="cpu")


def test_a_backward_that_breaks_gives_way_with_one_warning(fake, hasher, tokens, fresh_warnings, monkeypatch):
    def broken(*_):
        raise fused.CannotRun("too little shared memory")

    monkeypatch.setattr(Fake, "backward", staticmethod(broken))
    for step in range(2):
        leaf = tokens.clone().requires_grad_()
        out = eco_attention(leaf, tokens, hasher)
        with pytest.warns(UserWarning, match="too little shared memory") if step == 0 else nullcontext():
            (found,) = torch.autograd.grad(out.square().sum(), leaf)
        (expected,) = torch.autograd.grad(by_steps(leaf, tokens, hasher).square().sum(), leaf)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["support_samples", "mean", "sigma"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_hash_functions_that_are_not_all_fp32_go_to_eager(hasher, tokens, ran, name, dtype):
    eco_attention(tokens, tokens, hasher)
    assert ran == ["cpu"]
    setattr(hasher, name, getattr(hasher, name).to(dtype))
    eco_attention(tokens, tokens, hasher)
    assert ran == ["cpu"]


def test_a_backend_that_broke_has_gradients_too(fake, hasher, tokens, fresh_warnings, monkeypatch):
    def broken(*_, **__):
        raise fused.CannotRun("out of memory")

    monkeypatch.setattr(Fake, "forward", staticmethod(broken))
    leaf = tokens.clone().requires_grad_()
    with pytest.warns(UserWarning, match="out of memory"):
        out = eco_attention(leaf, tokens, hasher)
    (found,) = torch.autograd.grad(out.square().sum(), leaf)
    (expected,) = torch.autograd.grad(by_steps(leaf, tokens, hasher).square().sum(), leaf)
    torch.testing.assert_close(found, expected)


def layer_and_input():
    layer = ecoformer.EcoAttention(16, 2).eval().requires_grad_(False)
    layer.hasher.fit(torch.randn(2, 2, 60, 8), options=QUICK)
    return layer, torch.randn(2, 40, 16)


def test_compiles_without_a_break(ran):
    layer, x = layer_and_input()
    expected = layer(x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ran.clear()
    torch.testing.assert_close(compiled(x), expected)
    assert ran == ["cpu"]
    torch.testing.assert_close(compiled(x[:, :23]), layer(x[:, :23]))


@pytest.mark.parametrize("make", [KernelHasher, LshHasher])
def test_compiled_code_asks_with_the_whole_call(make, fake, monkeypatch, tokens):
    def cannot(call, *, needs_grad):
        asked.append(call)

    asked = []
    hasher = make(2, 8, 16).fit(tokens, options=QUICK)
    expected = eco_attention(tokens, tokens, hasher)
    monkeypatch.setattr(Fake, "cannot", staticmethod(cannot))
    torch.compiler.reset()
    compiled = torch.compile(eco_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, tokens, hasher), expected)
    assert type(asked[0].functions) is type(hasher.functions())
    for x, y in zip(asked[0].functions, hasher.functions(), strict=True):
        assert torch.equal(x, y)


def test_compiles_with_gradients(fake):
    layer, x = layer_and_input()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = Fake.saved
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert Fake.saved == before + 1
    torch.testing.assert_close(found, expected)


def test_exports_need_no_backend(ran):
    layer, x = layer_and_input()
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        assert "ecoformer" not in str(program.graph)
        out = program.module()(x)
    assert ran == []
    torch.testing.assert_close(out, layer(x))


def test_autocast_hashes_in_fp32(ran):
    layer, x = layer_and_input()
    with torch.autocast("cpu", torch.bfloat16):
        q, _, v = layer._project(x)
        out = layer.attend(q, q, v, None, False)
    assert out.dtype == torch.bfloat16
    assert ran == ["cpu"]
    wide = layer.attend(q.float(), q.float(), v.float(), None, False)
    assert torch.equal(out, wide.to(torch.bfloat16))


class Items(torch.utils.data.Dataset):
    """Attends in the worker, with two threads of our own; PyTorch's would not survive the fork."""

    def __init__(self, hasher):
        self.hasher, self.q = hasher, torch.randn(1, 2, 3000, 8)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        torch.set_num_threads(2)
        return eco_attention(self.q[:, :1], self.q[:, :1], self.hasher)


def test_forked_workers_run_it_too():
    items = Items(KernelHasher(1, 8, 16, 5).fit(torch.randn(2, 1, 60, 8), options=QUICK))
    expected = items[0]
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        items, num_workers=1, batch_size=None, multiprocessing_context="fork", timeout=60
    )
    assert all(torch.equal(out, expected) for out in loader)
