"""What a measured figure depends on: the device and the versions."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import ecoformer


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and ecoformer."""
    own = ecoformer.__version__
    return {"python": platform.python_version(), "torch": torch.__version__, "ecoformer": own}


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(filter(None, names), f"{platform.machine()} CPU")
    return f"{name}, {torch.get_num_threads()} threads"
