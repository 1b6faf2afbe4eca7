"""A head of a million tokens runs forward and backward in less than 2 GB."""

from __future__ import annotations

import subprocess
import sys

import pytest

ONE_HEAD = """
import torch
from ecoformer import hash_attention

torch.set_num_threads(1)
n = 1_000_000
codes_q, codes_k = (torch.randint(0, 2, (1, 1, n, 16)).mul_(2).sub_(1).float().requires_grad_() for _ in "qk")
v = torch.randn(1, 1, n, 32, requires_grad=True)
out = hash_attention(codes_q, codes_k, v, is_causal={is_causal})
gradients = torch.autograd.grad(out, (codes_q, codes_k, v), torch.randn_like(out))
sound = all(x.isfinite().all() and x.any() for x in (out, *gradients))
# Peak memory of this process; ru_maxrss would count what its parent held when it was forked.
status = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(peak, sound)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_million_tokens_fit_in_two_gigabytes(is_causal):
    command = [sys.executable, "-c", ONE_HEAD.format(is_causal=is_causal)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    peak, sound = run.stdout.split()
    assert sound == "True"
    assert int(peak) < 2_000_000_000, f"{int(peak) / 1e9:.2f} GB"
