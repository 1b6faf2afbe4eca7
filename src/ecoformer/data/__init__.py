"""Data sets by name, and the samples that come with scikit-learn."""

from ecoformer.data import digits, recall
from ecoformer.data.registry import list_datasets, load, register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Images, Splits

__all__ = [
    "IGNORED",
    "Arrays",
    "Images",
    "Splits",
    "digits",
    "list_datasets",
    "load",
    "recall",
    "register_dataset",
]
