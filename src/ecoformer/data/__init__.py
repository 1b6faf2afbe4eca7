"""Data sets by name, and the samples that come with scikit-learn."""

# Importing a module registers its data sets.
from ecoformer.data import aan, augment, cifar, images, listops, masking, recall, samples, stored, texts
from ecoformer.data.masking import MASK, mask_bytes
from ecoformer.data.registry import list_datasets, load, register_dataset
from ecoformer.data.splits import IGNORED, Arrays, Images, Splits
from ecoformer.data.stored import store
from ecoformer.data.texts import PAD, byte_tokens

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
    "images",
    "list_datasets",
    "listops",
    "load",
    "mask_bytes",
    "masking",
    "recall",
    "register_dataset",
    "samples",
    "store",
    "stored",
    "texts",
]
