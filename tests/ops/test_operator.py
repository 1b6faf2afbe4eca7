"""Hashed attention as an operator of PyTorch: compiled, exported, transformed, in threads and processes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from calls import FLAGS, LEAVES, make_call, results
from torch.export import Dim
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from ecoformer import affinity as affinities
from ecoformer import hash_attention, pack_codes, unpack_codes, use_kernels
from ecoformer.ops import cpu
from ecoformer.ops.hash_attention import kernels_for

OPS = torch.ops.ecoformer
ORDERS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
EVERY = pytest.mark.parametrize("flags", [{flag} for flag in ("none", *FLAGS)], ids=["none", *FLAGS])


class FromTokens(torch.nn.Module):
    """Numbers to attention, as a graph to be compiled or exported."""

    def __init__(self, causal=False, shared=True):
        super().__init__()
        self.causal, self.shared = causal, shared

    def forward(self, x, v, mask, f):
        k = x if self.shared else x.flip(-1)
        return hash_attention(x, k, v, f, key_padding_mask=mask, is_causal=self.causal)


def token_inputs(batch, n, f=None):
    # No two sizes are equal: PyTorch would take them for one.
    f = affinities.grouped(0.5, 1.0, 6, 6) if f is None else f
    return torch.randn(batch, 5, n, 6), torch.randn(batch, 5, n, 3), torch.rand(batch, n) < 0.3, f


def assert_same_with_gradients(ours, plain, inputs):
    leaves = [x.clone().requires_grad_() for x in (inputs[0], inputs[1], inputs[3])]
    outs = [function(leaves[0], leaves[1], inputs[2], leaves[2]) for function in (ours, plain)]
    torch.testing.assert_close(*outs)
    weight = torch.randn_like(outs[0])
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), leaves) for out in outs))


@ORDERS
@EVERY
def test_operators_are_proper(flags, causal):
    call = make_call(9, 11, 6, 4, 3, flags, causal=causal)
    weight = call["key_weight"]
    if call["key_padding_mask"] is not None:
        weight = (~call["key_padding_mask"])[:, None].float()
    tensors = [call[x] for x in ("q", "k", "v", "affinity")] + [weight, call["state"]]
    tensors[2] = tensors[2].nan_to_num()
    torch.library.opcheck(OPS.hash_attention.default, (*tensors, 6, causal))
    with torch.no_grad():
        found = OPS.hash_attention(*tensors, 6, causal)
    given = (call["grad"], call["grad_state"], *tensors, *found, 6, causal)
    torch.library.opcheck(OPS.hash_attention_backward.default, given)


@ORDERS
@pytest.mark.parametrize("shared", [False, True])
def test_compiles_once_for_all_sizes(causal, shared):
    torch.compiler.reset()
    plain = FromTokens(causal, shared)
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, n in ((2, 9), (3, 70), (4, 130)):
            assert_same_with_gradients(compiled, plain, token_inputs(batch, n))


def test_compiles_without_gradients_and_with_the_papers_affinity():
    torch.compiler.reset()
    plain, (x, v, mask, _) = FromTokens(), token_inputs(2, 9)
    with torch.no_grad():
        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, v, mask, None), plain(x, v, mask, None))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiles_to_machine_code():
    torch.compiler.reset()
    plain = FromTokens(causal=True)
    assert_same_with_gradients(torch.compile(plain, fullgraph=True), plain, token_inputs(2, 70))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@ORDERS
@pytest.mark.parametrize("f", [None, affinities.grouped(0.5, 1.0, 6)], ids=["paper", "grouped"])
def test_exports_as_one_operator_with_any_batch_and_length(f, causal):
    batch, tokens = Dim("batch", max=1024), Dim("tokens", max=1 << 20)
    shapes = ({0: batch, 2: tokens}, {0: batch, 2: tokens}, {0: batch, 1: tokens}, None)
    module = FromTokens(causal)
    inputs = (*token_inputs(2, 9)[:3], f)
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    assert [n.target for n in program.graph.nodes].count(OPS.hash_attention.default) == 1
    for size in ((3, 17), (6, 130), (1, 64), (4, 2)):
        inputs = (*token_inputs(*size)[:3], f)
        torch.testing.assert_close(program.module()(*inputs), module(*inputs))


@ORDERS
@EVERY
def test_vmap_over_any_argument(flags, causal):
    """All that a call takes, of which some have the new axis and others are shared."""
    calls = [make_call(9, 11, 6, 4, 3, flags, causal=causal, seed=seed) for seed in range(3)]
    for call in calls:
        call["v"] = call["v"].nan_to_num()  # each is seen with the others' masks
    names = [*LEAVES, "key_padding_mask"]
    options = {"bits": 6, "is_causal": causal}

    def attend(*tensors):
        call = dict(zip(names, tensors, strict=True))
        k = call["q"] if call["k"] is None else call.pop("k")
        call.pop("k", None)
        return hash_attention(call.pop("q"), k, call.pop("v"), **call, **options, return_state=True)

    stacked = [None if calls[0][x] is None else torch.stack([c[x] for c in calls]) for x in names]
    first = [calls[0][x] for x in names]
    for alone in (None, *range(len(names))):  # everything has the axis, and one after the other has it alone
        if alone is not None and stacked[alone] is None:
            continue
        batched = [x is not None and alone in (None, i) for i, x in enumerate(stacked)]
        given = [x if b else y for x, y, b in zip(stacked, first, batched, strict=True)]
        found = vmap(attend, tuple(0 if b else None for b in batched))(*given)
        for i in range(3):
            expected = attend(*(x[i] if b else x for x, b in zip(given, batched, strict=True)))
            torch.testing.assert_close(tuple(x[i] for x in found), expected)


@ORDERS
@pytest.mark.parametrize("shared", [False, True], ids=["own f", "one f"])
def test_function_transforms_give_autograds_gradients(shared, causal):
    calls = [
        make_call(9, None, 6, 4, 3, {"weighted", "state"}, causal=causal, seed=seed) for seed in range(3)
    ]
    stacked = [torch.stack([call[name] for call in calls]) for name in LEAVES]
    stacked[2] = stacked[2].nan_to_num()

    def loss(q, k, v, f, weight, state):
        options = {"key_weight": weight, "state": state, "is_causal": causal}
        return hash_attention(q, k, v, f, **options).square().sum()

    everywhere = tuple(range(6))
    one = [x[0] for x in stacked]
    leaves = [x.clone().requires_grad_() for x in one]
    torch.testing.assert_close(grad(loss, everywhere)(*one), torch.autograd.grad(loss(*leaves), leaves))
    if shared:
        stacked[3] = stacked[3][0]
    dims = tuple(None if shared and i == 3 else 0 for i in range(6))
    found = vmap(grad(loss, everywhere), dims)(*stacked)
    for i in range(3):
        given = [x if dim is None else x[i] for x, dim in zip(stacked, dims, strict=True)]
        torch.testing.assert_close(tuple(x[i] for x in found), grad(loss, everywhere)(*given))
    twice = [x if dim is None else torch.stack([x, x]) for x, dim in zip(stacked, dims, strict=True)]
    found = vmap(vmap(loss, dims), dims)(*twice)
    torch.testing.assert_close(found, vmap(loss, dims)(*stacked).expand(2, 3))


def test_vmap_over_packing():
    y = torch.randn(4, 3, 9, 16)
    assert torch.equal(vmap(pack_codes)(y), pack_codes(y))
    assert torch.equal(vmap(partial(unpack_codes, bits=16))(pack_codes(y)), torch.where(y >= 0, 1.0, -1.0))


@ORDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, causal):
    """Sums stay in fp32; outputs have v's dtype."""
    call = make_call(70, flags={"weighted"}, causal=causal)
    expected = results(call, "eager")
    with torch.autocast("cpu", dtype):
        found = results(call, "eager")
    for name, x in found.items():
        assert torch.equal(x, expected[name])


@ORDERS
def test_tensors_without_memory(causal):
    call = make_call(9, flags={"weighted", "state"}, causal=causal)
    tensors = [call[x].to("meta").requires_grad_() for x in LEAVES]
    options = {"key_weight": tensors[4], "state": tensors[5], "is_causal": causal}
    out, after = hash_attention(*tensors[:4], **options, return_state=True)
    real, real_after = hash_attention(*(call[x] for x in LEAVES[:4]), **options | {
        "key_weight": call["key_weight"], "state": call["state"]}, return_state=True)  # fmt: skip
    for x, y in ((out, real), (after, real_after)):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    gradients = torch.autograd.grad(out.sum() + after.sum(), tensors)
    assert [x.shape for x in gradients] == [x.shape for x in tensors]


def test_checkpoints_and_calls_under_inference_mode():
    """Neither what was computed without gradients nor what is computed twice changes gradients."""
    call = make_call(40)
    q, k, v = (call[x] for x in "qkv")
    with torch.inference_mode():
        first = hash_attention(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = hash_attention(*leaves)
    assert torch.equal(first, out)
    expected = torch.autograd.grad(out, leaves, call["grad"])
    for reentrant in (False, True):
        for x in leaves:
            x.grad = None
        checkpoint(hash_attention, *leaves, use_reentrant=reentrant).backward(call["grad"])
        assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))


def test_only_what_is_asked_for_has_a_gradient():
    call = make_call(20, flags={"weighted"})
    q, k, v, f, weight = (call[x] for x in ("q", "k", "v", "affinity", "key_weight"))
    out = hash_attention(q, k, v, f.requires_grad_(), key_weight=weight)
    out.sum().backward()
    assert f.grad.shape == f.shape
    assert all(x.grad is None for x in (q, k, v, weight))
    assert not hash_attention(pack_codes(q), pack_codes(k), v, bits=16).requires_grad
    _, state = hash_attention(q, k, v, return_state=True, state=torch.zeros(2, 2, 64, 33))
    assert not state.requires_grad


def test_second_gradients_are_refused_not_wrong():
    call = make_call(9)
    q, v = call["q"].requires_grad_(), call["v"].nan_to_num().requires_grad_()
    (first,) = torch.autograd.grad(hash_attention(q, q, v).square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.square().sum(), v)


@pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built")
class TestUseKernels:
    def name_of_kernels(self, x=None, bits=16):
        x = torch.empty(1) if x is None else x
        return kernels_for(x, bits, "forward").__module__.rpartition(".")[2]

    def test_the_fastest_that_takes_the_call_runs(self):
        assert self.name_of_kernels() == "cpu"
        assert self.name_of_kernels(bits=65) == "eager"
        assert self.name_of_kernels(torch.empty(1, dtype=torch.float64)) == "eager"
        assert self.name_of_kernels(torch.empty(1, device="meta")) == "eager"
        with use_kernels("triton"):
            assert self.name_of_kernels() == "eager"
        with use_kernels("eager"):
            assert self.name_of_kernels() == "eager"
            with use_kernels("cpu"):
                assert self.name_of_kernels() == "cpu"
            assert self.name_of_kernels() == "eager"

    def test_tasks_and_threads_have_their_own(self):
        default, found = self.name_of_kernels(), []

        async def task(name):
            with use_kernels(name):
                await asyncio.sleep(0.01)  # the others have begun
                found.append(self.name_of_kernels())

        async def tasks():
            await asyncio.gather(task("eager"), task("cpu"), task("eager"))

        asyncio.run(tasks())
        assert found == ["eager", "cpu", "eager"]
        with use_kernels("eager"):
            thread = threading.Thread(target=lambda: found.append(self.name_of_kernels()))
            thread.start()
            thread.join()
        assert found[3] == default


@pytest.mark.skipif(cpu.library() is None, reason="the kernels were not built")
class TestThreadsAndProcesses:
    def test_threads_compute_side_by_side(self, monkeypatch):
        monkeypatch.setattr(cpu, "LITTLE", 0)
        torch.set_num_threads(2)
        calls = [make_call(300, flags={"weighted"}, seed=seed, causal=bool(seed % 2)) for seed in range(4)]
        expected, found = [results(call, "cpu") for call in calls], {}

        def work(i):
            for _ in range(5):
                found[i] = results(calls[i], "cpu")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(1)
        for i, one in enumerate(expected):
            assert all(torch.equal(x, found[i][name]) for name, x in one.items())

    @pytest.mark.skipif(sys.platform != "linux", reason="forks")
    def test_a_forked_child_computes(self):
        program = """
import os, torch
from ecoformer import hash_attention
from ecoformer.ops import cpu
cpu.LITTLE = 0
torch.set_num_threads(2)
q, v = torch.randn(1, 4, 200, 16, requires_grad=True), torch.randn(1, 4, 200, 32)  # less than PyTorch shares
def both():
    out = hash_attention(q, q, v)
    return [out, *torch.autograd.grad(out.square().sum(), q)]
expected = both()
child = os.fork()
if not child:
    right = all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(both(), expected))
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert all(torch.equal(x, y) for x, y in zip(both(), expected))
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
