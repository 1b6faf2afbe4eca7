"""The Triton kernels on the CPU.

The interpreter must be chosen before Triton is imported, which other tests of the same process have done
already; so `test_triton_kernels.py` runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("test_triton_kernels.py")


def run(*options):
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


@pytest.mark.parametrize("part", ["test_output_and_gradients", "not test_output_and_gradients"])
def test_kernels(part):
    run("-m", "not slow", "-k", part)


@pytest.mark.slow
def test_kernels_thoroughly():
    run("-m", "slow")
