"""What the compiler makes of the Triton kernels for a Hopper GPU. It needs no GPU."""

import os
import re

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ecoformer.backends.triton import causal
from ecoformer.backends.triton.backward import attend_back, gather_grad, token_grad
from ecoformer.backends.triton.configs import ONE_TILE, Sizes, causal_config, default, padded
from ecoformer.backends.triton.forward import attend, gather, hash_and_read, read
from ecoformer.backends.triton.groups import mix_parts
from ecoformer.backends.triton.hashing import COUNTS
from ecoformer.backends.triton.state import add_parts, running_sums

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")

HOPPER = GPUTarget("cuda", 90, 32)
STEPS = {
    gather: "gather",
    read: "read",
    attend: "gather",
    hash_and_read: "gather",
    gather_grad: "gather_grad",
    token_grad: "token_grad",
    attend_back: "gather_grad",
}
IN_ORDER = (causal.causal_gather, causal.causal_read, causal.causal_gather_grad, causal.causal_token_grad)
FLOATS = (
    "reads", "state", "states", "table", "partial", "support", "mean", "sigma", "weight", "to_weight",
    "to_buckets", "state_walsh", "walsh", "to_bit", "to_levels", "scales", "ratios", "floor",
    "key_weight", "to_key_weight", "mixed", "other", "other_walsh",
)  # fmt: skip
HALVES = ("grad", "x", "v", "mask", "out", "to_x", "to_v")


def compiled(kernel, config, dim, bits, support, size):
    """The kernel for bf16 tokens that lie as layers make them, as PTX."""
    features = bits // size << size if size else bits
    both = config.stride == 1
    constants = {
        "D": dim, "E": dim, "F": features, "M": support, "BITS": bits, "BD": padded(dim), "BE": padded(dim),
        "BF": padded(features), "BM": padded(support), "BB": padded(bits), "BLOCK": config.block,
        "SIZE": size, "PLANES": False, "STRIDE": config.stride, "WIDE": config.warps >= 4,
        "PIECES": 2, "PRECISION": "tf32x3", "GRAD_PRECISION": "bf16", "MASKED": True, "WHOLE": True,
        "SINGLE": config.per_sm == ONE_TILE, "QUERIES": both, "KEYS": True, "TOKENS": True, "VALUES": True,
        "WEIGHT": True, "WEIGHTED": size > 0, "KEY_WEIGHT": size > 0, "SHARED": both, "LEVELS": False,
        "STORED": False, "ADDED": False,
    }  # fmt: skip
    names = kernel.arg_names
    types, properties = {}, {}
    for place, name in enumerate(names):
        aligned = True
        if name in constants:
            types[name], aligned = "constexpr", False
        elif name in FLOATS:
            types[name] = "*fp32"
        elif name in HALVES:
            types[name] = "*bf16"
        elif name in ("codes", "key_codes"):
            types[name] = "*i16" if bits <= 16 else "*i32" if bits <= 32 else "*i64"
        elif name == "beta":
            types[name], aligned = "fp32", False
        elif name.endswith("_c"):
            types[name], constants[name], aligned = "constexpr", 1, False
        else:
            types[name] = "i32"
        if aligned:
            properties[(place,)] = [["tt.divisibility", 16]]
    known = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=types, constexprs=known, attrs=properties)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


COMMON, LARGE, GROUPS, WIDE_GROUPS = (64, 16, 25, 0), (40, 64, 64, 0), (64, 16, 25, 4), (128, 32, 64, 4)
# The others are made of the same pieces, and seconds each.
QUICK = [(kernel, COMMON) for kernel in (*STEPS, *IN_ORDER)]
QUICK += [(kernel, LARGE) for kernel in (gather, gather_grad, token_grad, causal.causal_token_grad)]
QUICK += [(kernel, GROUPS) for kernel in (gather, read, gather_grad, token_grad, causal.causal_read)]
THOROUGH = [
    (kernel, sizes)
    for sizes in (LARGE, GROUPS, WIDE_GROUPS)
    for kernel in (*STEPS, *IN_ORDER)
    if (kernel, sizes) not in QUICK and not (sizes == WIDE_GROUPS and kernel in IN_ORDER)
]


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_kernel_has_asynchronous_products(kernel, sizes, monkeypatch, tmp_path):
    """See `configs.has_async_products`. Products themselves are on tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dim, bits, support, size = sizes
    tokens = 196 if kernel in (attend, attend_back) else 3136
    features = bits // size << size if size else 0
    shape = Sizes(1280, tokens, dim, dim, support, bits, torch.bfloat16, features)
    config = causal_config(shape) if kernel in IN_ORDER else default(STEPS[kernel], shape)
    code = compiled(kernel, config, *sizes)
    assert "wgmma" not in code
    assert re.search(r"mma\.sync\S*\.bf16\.bf16", code)


@pytest.mark.parametrize(
    "kernel", [*STEPS, *IN_ORDER, add_parts, mix_parts, running_sums], ids=lambda kernel: kernel.__name__
)
def test_nothing_is_compiled_anew_for_a_count(kernel):
    """A length that is cut into another number of parts must not stop a user for seconds."""
    counts = [parameter for parameter in kernel.params if parameter.name in COUNTS]
    assert counts
    assert all(parameter.do_not_specialize for parameter in counts)
    numbers = {
        name for name in kernel.arg_names if name.islower() and not name.endswith(("_b", "_h", "_n", "_c"))
    }
    assert numbers - {*COUNTS, *FLOATS, *HALVES, "codes", "key_codes", "beta", "parts_ptr"} <= {
        "n",
        "span",
        "width",
    }
