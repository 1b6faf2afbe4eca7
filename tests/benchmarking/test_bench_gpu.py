"""The same on a CUDA device; run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from ecoformer.benchmarking.attention import MECHANISMS, bench_attention
from ecoformer.benchmarking.memory import peak_memory_mb
from ecoformer.benchmarking.meters import open_meter
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.timing import time_contestants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows(dtype, is_causal, backward):
    setting = Setting((2, 3, 1500, 32), dtype, GPU, is_causal, backward)
    names = [name for name in (*MECHANISMS, "explicit") if not (is_causal and name == "linformer")]
    run = bench_attention([setting, replace(setting, shape=(1, 1, 63, 40))], names, seconds=0.05)
    assert [row.failure for row in run.rows] == [None] * len(run.rows)
    assert all(row.timing.median_ms > 0 and row.peak_mb > 0 for row in run.rows)


def test_time_is_that_of_the_device():
    """Launching returns at once; the work takes milliseconds."""
    a = torch.randn(4096, 4096, device=GPU)
    timings = time_contestants({"one": lambda: a @ a, "three": lambda: a @ a @ a @ a}, GPU, seconds=0.3)
    assert timings["three"].median_ms == pytest.approx(3 * timings["one"].median_ms, rel=0.3)


def test_peak_memory():
    x = torch.ones(1_000_000, device=GPU)
    assert peak_memory_mb(lambda: (x + 1) * 2, GPU) == pytest.approx(8, rel=0.1)


def test_a_gpu_uses_energy():
    pytest.importorskip("pynvml")
    meter, missing = open_meter(GPU)
    if meter is None:
        pytest.skip(missing)
    a = torch.randn(8192, 8192, device=GPU)
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
    assert meter.joules() > 1
    meter.close()
