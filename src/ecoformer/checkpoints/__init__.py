"""Checkpoints: our own files, and those that the authors of EcoFormer released."""

from ecoformer.checkpoints.files import load, save
from ecoformer.checkpoints.official import load_official
from ecoformer.storage import CheckpointError

__all__ = ["CheckpointError", "load", "load_official", "save"]
