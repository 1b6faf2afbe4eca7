"""Memory is linear in tokens: 250,000 attended to, and 16,384 learned from, in little of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

ONE_HEAD = """
n = 250_000
codes_q, codes_k = (torch.randint(0, 2, (1, 1, n, 16)).mul_(2).sub_(1).float().requires_grad_() for _ in "qk")
v = torch.randn(1, 1, n, 32, requires_grad=True)
out = ecoformer.hash_attention(codes_q, codes_k, v, is_causal={is_causal})
gradients = torch.autograd.grad(out, (codes_q, codes_k, v), torch.randn_like(out))
sound = all(x.isfinite().all() and x.any() for x in (out, *gradients))
"""
FITTING = """
torch.set_num_threads(2)  # two heaps to scatter
options = ecoformer.FitOptions(steps=2)
hasher = ecoformer.KernelHasher(1, 32).fit(torch.randn(1, 1, 16_384, 32), options=options)
sound = bool(hasher.fitted)
"""
# Peak memory of the process; ru_maxrss would count what its parent held when it was forked.
PEAK = """
status = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")), sound)
"""
PROGRAMS = {
    "full": ONE_HEAD.format(is_causal=False),
    "causal": ONE_HEAD.format(is_causal=True),
    "fitting": FITTING,
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_long_sequences_take_little_memory(program):
    start = "import torch, ecoformer\ntorch.set_num_threads(1)\n"
    command = [sys.executable, "-c", start + program + PEAK]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak, sound = run.stdout.split()
    assert sound == "True"
    assert int(peak) < 1_100_000_000, f"{int(peak) / 1e9:.2f} GB"
