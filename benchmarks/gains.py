"""What a conversion gains against the model as it is: PVTv2-B0, ViT-S/16 and a BERT at three sizes each.

    python benchmarks/gains.py

writes results/gains.json: for native, softmax, eco and sharp_eco the energy by the exact accounting of the
CPU kernels, and the CPU time of one thread, which depends less on what else the machine does than the wall
clock. Weights are random: neither figure depends on them.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import write_result
from torch import Tensor, nn

import ecoformer

MECHANISMS = ("native", "softmax", "eco", "sharp_eco")
ROUNDS = 7


def picture_model(name: str) -> Callable[[int], tuple[nn.Module, dict[str, Tensor]]]:
    def build(side: int) -> tuple[nn.Module, dict[str, Tensor]]:
        import timm

        size: dict[str, Any] = {} if name.startswith("pvt") else {"img_size": side}
        return timm.create_model(name, **size), {"x": torch.randn(1, 3, side, side)}

    return build


def text_model(tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    size: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    config = BertConfig(**size, max_position_embeddings=max(512, tokens))
    model: nn.Module = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    return model, {"input_ids": torch.randint(1000, (1, tokens))}


CASES: list[tuple[str, str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]], tuple[int, ...]]] = [
    ("PVTv2-B0", "pixels", picture_model("pvt_v2_b0"), (224, 512, 1024)),
    ("ViT-S/16", "pixels", picture_model("vit_small_patch16_224"), (224, 512, 1024)),
    ("BERT, 6 layers of 384", "tokens", text_model, (128, 512, 4096)),
]


def measured(models: dict[str, nn.Module], example: dict[str, Tensor]) -> dict[str, float]:
    """Median seconds of a forward pass, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for turn in range(ROUNDS + 1):
            for name, model in models.items():
                start = time.process_time()
                model(**example)
                if turn:  # the first one warms up
                    seconds[name].append(time.process_time() - start)
    return {name: median(times) for name, times in seconds.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*hash functions.*")
    rows: list[dict[str, Any]] = []
    for model_name, unit, build, sizes in CASES:
        for size in sizes:
            native, example = build(size)
            models = {name: copy.deepcopy(native).eval() for name in MECHANISMS}
            for name in MECHANISMS[1:]:
                ecoformer.convert(models[name], name)
            sizes_of = example if unit == "tokens" else (1, 3, size, size)
            energy = {
                name: ecoformer.cost(model, sizes_of, accounting="exact", backend="cpu").energy_pj
                for name, model in models.items()
            }
            seconds = measured(models, example)
            rows.append(
                {"model": model_name, "size": size, "unit": unit, "energy_pj": energy, "cpu_seconds": seconds}
            )
            print(
                model_name,
                size,
                *(
                    f"{n} {energy[n] / energy['native']:.2f} {seconds[n] / seconds['native']:.2f}"
                    for n in MECHANISMS
                ),
                flush=True,
            )
    print(f"wrote {write_result('gains', rows)}")


if __name__ == "__main__":
    main()
