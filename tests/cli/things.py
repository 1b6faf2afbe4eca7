"""Models, files and folders that the tests of the command line share."""

import os
import pathlib
import runpy

import torch

from ecoformer.conversion.layers import find_layers

SMALL = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1), "num_classes": 5}
TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 20, "pad_token_id": 0}
VISION = {key: TEXT[key] for key in list(TEXT)[1:5]} | {"image_size": 32, "patch_size": 8}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(ord("a") + i) for i in range(26))]
OF_PYRAMID = [f"stages.{stage}.blocks.0.attn" for stage in range(4)]
OF_BERT = [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
QUICK = ("--attention", "eco", "--set", "bits=2", "--set", "support=3")
"""For fitting within a second."""


def released(**kwargs):
    """A state dict in the authors' layout; the helper lies with the loader's tests."""
    path = pathlib.Path(__file__).parents[1] / "checkpoints" / "released.py"
    return runpy.run_path(str(path))["state_dict"]("pvt_v2_b0", num_classes=7, seed=1, **kwargs)


class Touch:
    """A pickle that would create a folder when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def kinds(model):
    return {found.name: found.kind for found in find_layers(model)}


def names(layers):
    return [layer["name"] for layer in layers]


def same_state(one, two):
    one, two = (m if isinstance(m, dict) else m.state_dict() for m in (one, two))
    return one.keys() == two.keys() and all(torch.equal(value, two[key]) for key, value in one.items())
