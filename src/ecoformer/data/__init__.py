"""Data sets by name, and the samples that come with scikit-learn."""

# Importing a data set's module registers it.
from ecoformer.data import aan, augment, cifar, digits, images, listops, masking, recall, stored, texts
from ecoformer.data.bytes import PAD, byte_tokens
from ecoformer.data.masking import MASK, mask_bytes
from ecoformer.data.registry import list_datasets, load, register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Images, Splits
from ecoformer.data.stored import store

__all__ = [
    "IGNORED",
    "MASK",
    "PAD",
    "Arrays",
    "Images",
    "Splits",
    "aan",
    "augment",
    "byte_tokens",
    "cifar",
    "digits",
    "images",
    "list_datasets",
    "listops",
    "load",
    "mask_bytes",
    "masking",
    "recall",
    "register_dataset",
    "store",
    "stored",
    "texts",
]
