"""What the compiler makes of the Triton kernels for a Hopper GPU. It needs no GPU."""

import os
import re
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from ecoformer.backends.fused import FusedCall, empty_out
from ecoformer.backends.hashing import HashFunctions, Signs
from ecoformer.backends.triton import backward, causal, forward, groups, launch, launch_backward, state
from ecoformer.backends.triton.hashing import COUNTS
from ecoformer.backends.triton.plans import Slot

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Case(NamedTuple):
    """A call whose launches are compiled."""

    tokens: int = 3136
    channels: int = 64
    bits: int = 16
    groups: int | None = None
    signs: bool = False
    causal: bool = False
    samples: int = 25
    dtype: torch.dtype = torch.bfloat16


QUICK = [
    Case(),
    Case(tokens=196),
    Case(causal=True),
    Case(groups=4, signs=True),
]
# These are made of the same pieces, and take long.
THOROUGH = [
    Case(groups=4),
    Case(channels=40, bits=64, samples=64),
    Case(channels=32, groups=4, signs=True),
    Case(channels=40, bits=64, samples=64, causal=True),
    Case(tokens=196, groups=4),
    Case(groups=4, causal=True),
    Case(channels=128, bits=32, samples=64, groups=8),
    Case(groups=4, signs=True, causal=True),
    Case(groups=4, signs=True, dtype=torch.float32),
]


def launches(case):
    """All launches of a call with mask and weights of keys, and of its backward, on an H200."""
    heads, channels = 5, case.channels

    def tokens(width):
        lead = (256, case.tokens, heads)
        return torch.empty(*lead, width, dtype=case.dtype, device="meta").transpose(1, 2)

    functions, k, levels = Signs(), None, (None, None, None)
    if case.signs:
        k = tokens(case.bits)
    else:
        support = torch.empty(heads, case.samples, channels)
        weight = torch.empty(heads, case.samples, case.bits)
        functions = HashFunctions(support, support[..., 0], support[:, 0, 0], weight)
    if case.groups:
        levels = (*torch.empty(2, heads, case.groups), torch.empty(heads))
    q, v = tokens(case.bits if case.signs else channels), tokens(channels)
    mask = torch.empty(256, case.tokens, dtype=torch.bool, device="meta")
    key_weight = tokens(1)[..., 0] if case.groups else None
    call = FusedCall(q, k, v, mask, key_weight, functions, None, *levels, 32.0, case.causal)
    out = empty_out(q, v)
    forward_plan = launch._Forward(call, [*launch.tensors_of(call), out], True)
    saved = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in launch._saved_shapes(call)]
    needs = tuple(x is not None for x in call.differentiable())
    back = launch_backward._Backward(call, [*launch.tensors_of(call), out, *saved], needs)
    return [*forward_plan._launches, *back._launches]


def compiled(launched):
    """A launch as PTX."""
    function, _, arguments, named, _ = launched
    types, constants, properties = {}, {}, {}
    plain = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    for place, name in enumerate(function.arg_names):
        x = arguments[place] if place < len(arguments) else named[name]
        aligned = False
        if place >= len(arguments) or (x == 1 and name not in plain):
            types[name], constants[(place,)] = "constexpr", x
        elif isinstance(x, Slot):
            types[name], aligned = POINTERS[x.dtype], True
        elif isinstance(x, float):
            types[name] = "fp32"
        else:
            types[name], aligned = "i32", x % 16 == 0 and name not in plain
        if aligned:
            properties[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=properties)
    options = {name: x for name, x in named.items() if name.startswith("num_")}
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in THOROUGH)])
def test_no_kernel_has_asynchronous_products(case, monkeypatch, tmp_path):
    """See `configs.has_async_products`. Products themselves are on tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_processors", lambda _: 132)
    # The assembler takes long and changes nothing that is looked at.
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
    found = {}
    for launched in launches(case):
        found.setdefault(launched.function.__name__, compiled(launched))
    for name, code in found.items():
        assert "wgmma" not in code, name
        if name not in ("add_parts", "running_sums", "sum_levels", "mix_parts"):
            assert re.search(r"mma\.sync\S*\.bf16\.bf16", code), name


KERNELS = [
    kernel
    for module in (forward, backward, causal, groups, state)
    for kernel in vars(module).values()
    if isinstance(kernel, triton.runtime.JITFunction) and any(p.do_not_specialize for p in kernel.params)
]


@pytest.mark.parametrize("kernel", dict.fromkeys(KERNELS), ids=lambda kernel: kernel.__name__)
def test_nothing_is_compiled_anew_for_a_count(kernel):
    """A length that is cut into another number of parts must not stop a user for seconds."""
    counts = [parameter for parameter in kernel.params if parameter.name in COUNTS]
    assert counts
    assert all(parameter.do_not_specialize for parameter in counts)
