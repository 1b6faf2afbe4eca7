"""The kernels in Triton: right by Triton's interpreter, and compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ecoformer import affinity as affinities
from ecoformer.ops import triton as kernels

CASES = Path(__file__).with_name("test_kernels.py")
QUICK = {
    "options": "triton-fp32 and (each_option or not_hidden)",
    "sizes": "triton-fp32 and (fp32-7- or 600-5 or whole_numbers or nobody or light)",
    "halves": "triton-fp16 and (whole_numbers or each_option and (masked or learned))",
}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
LAUNCHED = ("scatter", "mix", "read", "pairs", "scan", "matrices", "causal")


def interpret(*options):
    """Triton chooses its interpreter when it is imported, so this takes a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # numpy, which the interpreter computes with, warns of every NaN.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    finished = subprocess.run(
        [*command, str(CASES), *options],
        env={**environment, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    assert "passed" in finished.stdout


@pytest.mark.parametrize("part", QUICK.values(), ids=QUICK)
def test_by_the_interpreter(part):
    interpret("-k", part)


@pytest.mark.slow
def test_thoroughly_by_the_interpreter():
    interpret("-k", "triton")


def call_on_meta(shape, bits, size, d, flags, dtype):
    """Arguments of `forward` without any memory, and the gradients that `backward` takes."""
    (batch, heads, n_q, n_k), groups = shape, affinities.group_count(bits, size)
    tokens = lambda n, width: torch.empty(batch, n, heads, width, dtype=dtype, device="meta").transpose(1, 2)  # noqa: E731
    wide = lambda *sizes: torch.empty(*sizes, device="meta")  # noqa: E731
    q, k, v = tokens(n_q, bits), tokens(n_k, bits), tokens(n_k, d)
    if "packed" in flags:
        q, k = (torch.empty(x.shape[:3], dtype=torch.int64, device="meta") for x in (q, k))
    f = wide(1, groups, 1 << size, 1 << size) if "full" in flags else wide(1, groups, size + 1)
    weight = wide(batch, heads, n_k) if "weighted" in flags else None
    return (q, None if "shared" in flags else k, v, f, weight, None, bits, "causal" in flags), tokens(n_q, d)


def launches(monkeypatch, given, grad):
    """The kernels that a call and its gradients launch, each with its arguments."""
    found = {}

    class Recorder:
        def __init__(self, function):
            self.function = function

        def __getitem__(self, grid):
            def record(*given, **named):
                found.setdefault((self.function.__name__, str(named)), (self.function, given, named))

            return record

    for name in LAUNCHED:
        monkeypatch.setattr(kernels, name, Recorder(getattr(kernels, name)))
    out = kernels.forward(*given)
    kernels.backward(grad, None, *given[:6], *out, *given[6:])
    assert found
    return found.values()


def compiled_for_hopper(function, given, named):
    types, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        x = named[parameter.name] if parameter.name in named else given[place]
        if parameter.name in named or (type(x) is int and x == 1 and not parameter.do_not_specialize):
            types[parameter.name], constants[(place,)] = "constexpr", x
        else:
            types[parameter.name] = POINTERS[x.dtype] if isinstance(x, torch.Tensor) else "i32"
            if isinstance(x, torch.Tensor) or (x % 16 == 0 and not parameter.do_not_specialize):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    options = {name: x for name, x in named.items() if name.startswith("num_")}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)


COMPILED = {
    "plain": ((256, 1, 3136, 3136), 16, 4, 32, {"shared"}, torch.bfloat16),
    "weighted": ((256, 5, 196, 196), 16, 4, 64, {"weighted"}, torch.bfloat16),
    "packed": ((2, 8, 512, 512), 16, 4, 64, {"packed"}, torch.float16),
    "causal": ((1, 8, 65536, 65536), 16, 4, 64, {"causal", "weighted"}, torch.bfloat16),
    "full": ((2, 8, 512, 512), 14, 3, 40, {"full", "weighted"}, torch.float32),
    "causal fp32": ((2, 8, 512, 512), 16, 4, 64, {"causal"}, torch.float32),
    "many rows": ((2, 8, 512, 512), 64, 8, 80, {"weighted"}, torch.bfloat16),
    "many bits": ((2, 8, 512, 512), 64, 1, 128, {"weighted"}, torch.float32),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[] if x in ("plain", "causal") else pytest.mark.slow) for x in COMPILED]
)
def test_compiles_without_asynchronous_products(case, monkeypatch, tmp_path):
    """Assemblers before CUDA 13.3 get wgmma wrong. All but two are slow."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for function, given, named in launches(monkeypatch, *call_on_meta(*COMPILED[case])):
        assert named["num_warps"] <= 2
        made = compiled_for_hopper(function, given, named)
        assert made.asm["cubin"]
        assert "wgmma" not in made.asm["ptx"], function.__name__
        assert made.metadata.shared <= 99 * 1024, (function.__name__, made.metadata.shared)
        if function.__name__ not in ("scan", "matrices"):
            assert re.search(r"mma\.sync\S*\.bf16\.bf16", made.asm["ptx"]), function.__name__
