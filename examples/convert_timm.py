"""Convert a timm model, teach it what the original does, and save it.

    python examples/convert_timm.py

The original is a small ViT that first learns scikit-learn's digits, so that nothing is downloaded. With a
trained model and images of your own, start at `teacher`.
"""

import argparse
import copy

import timm
import torch
from torch.nn import functional as F

import ecoformer
from ecoformer.data import load


def main(steps: int = 300, out: str = "sharp_vit.safetensors") -> dict[str, float]:
    """Returns the accuracy after each stage."""
    torch.manual_seed(0)
    digits = load("digits")
    images, labels = digits.train.inputs / 255.0, digits.train.targets
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimiser.step()
        optimiser.zero_grad()

    def accuracy() -> float:
        with torch.inference_mode():
            answers = model.eval()(digits.test.inputs / 255.0).argmax(1)
        return (answers == digits.test.targets).float().mean().item()

    found = {"original": accuracy()}
    teacher = copy.deepcopy(model)
    batches = images.split(64)  # your data loader; no labels are needed
    print(ecoformer.convert(model, "sharp_eco", seed=0))
    found["converted"] = accuracy()
    ecoformer.transfer(model, teacher, batches, steps=steps)
    found["transferred"] = accuracy()
    ecoformer.distill(model, teacher, batches, steps=steps, lr=1e-3, loss="kl")
    found["distilled"] = accuracy()
    ecoformer.save(model, out, arguments=size)  # ecoformer.load(out) brings it back
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="sharp_vit.safetensors")
    for stage, share in main(**vars(parser.parse_args())).items():
        print(f"{stage:>11}: {share:.1%} right")
