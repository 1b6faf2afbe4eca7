"""Encode long texts: every byte is a token, and 4,096 of them cost little more than a few matrix products.

    python examples/long_text.py

Trains the Long Range Arena's small encoder to tell two kinds of text apart by a word that occurs only once,
anywhere in a long text, and compares its energy with softmax's.
"""

import argparse

import torch
from torch.nn import functional as F

import ecoformer
from ecoformer.models.text import TextEncoder, byte_tokens

FILLER = b"the quick brown fox jumps over the lazy dog "


def texts(count: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of various lengths with `!!!!` or `????` somewhere in them, and which of the two it is."""
    labels = torch.randint(2, (count,), generator=generator)
    rows = []
    for label in labels.tolist():
        size = int(torch.randint(length // 2, length - 4, (), generator=generator))
        text = (FILLER * (size // len(FILLER) + 1))[:size]
        place = int(torch.randint(size, (), generator=generator))
        rows.append(text[:place] + (b"????" if label else b"!!!!") + text[place:])
    return byte_tokens(rows, length), labels  # padded with 0, which attention never sees


def main(length: int = 4096, steps: int = 60) -> dict[str, float]:
    """Returns the accuracy, and the energy of one text with each mechanism in mJ."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = TextEncoder(attention="sharp_eco", length=length, dropout=0.0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens, labels = texts(16, length, generator)
        F.cross_entropy(model(tokens), labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    tokens, labels = texts(64, length, generator)
    with torch.inference_mode():
        right = (model.eval()(tokens).argmax(1) == labels).float().mean().item()
    found = {"accuracy": right}
    for name in ("softmax", "eco", "sharp_eco"):
        encoder = TextEncoder(attention=name, length=length)
        found[f"{name}, mJ"] = ecoformer.cost(encoder, {"tokens": tokens[:1]}).energy_pj / 1e9
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=60)
    for name, figure in main(**vars(parser.parse_args())).items():
        print(f"{name:>13}: {figure:.3f}")
