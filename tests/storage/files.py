"""What the tests of checkpoint files share."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from ecoformer.storage import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor):
    """Equal for tensors of equal dtype, shape and bits: NaN equals itself and 0.0 is not -0.0."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist()


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


def refused(call, *args, kind=CheckpointError, **kwargs):
    """The one line with which a call refuses."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    line = str(caught.value)
    assert line
    assert "\n" not in line
    return line


def with_metadata(path, metadata):
    safetensors.torch.save_file({"a": torch.zeros(3)}, path, metadata=metadata)
    return path
