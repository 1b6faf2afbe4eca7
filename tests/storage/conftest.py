"""Checkpoint files to start from."""

from __future__ import annotations

import pytest
import torch

from ecoformer.storage import write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def written(path):
    """A small checkpoint with tied names; its path."""
    shared = torch.arange(6.0).view(2, 3)
    tensors = {"a": shared, "b": torch.tensor([True, False]), "tied": shared, "scalar": torch.tensor(7)}
    return write(path, tensors, {"name": "small", "depth": 2})
