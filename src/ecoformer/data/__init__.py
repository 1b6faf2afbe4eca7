"""Data sets by name, and the samples that come with scikit-learn."""

from ecoformer.data import images, listops, mosaic, recall, samples  # noqa: F401  registers their data sets
from ecoformer.data.masking import MASK, mask_bytes
from ecoformer.data.registry import list_datasets, load, register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Splits
from ecoformer.data.texts import PAD, byte_tokens

__all__ = [
    "IGNORED",
    "MASK",
    "PAD",
    "Arrays",
    "Splits",
    "byte_tokens",
    "list_datasets",
    "load",
    "mask_bytes",
    "register_dataset",
]
