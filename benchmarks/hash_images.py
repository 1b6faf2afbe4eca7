"""Hash the tokens of real photographs, see which neighbours the codes keep and what attention saves.

python benchmarks/hash_images.py [--out out/demo.png]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from image_tokens import image_tokens, patches, sample_images
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from ecoformer import (
    FitOptions,
    Hasher,
    KernelHasher,
    KlshHasher,
    LshHasher,
    SignHasher,
    hash_attention,
    pack_codes,
)

BITS, SUPPORT, SIZE, PATCH = 16, 25, 224, 4
MUL_PJ, ADD_PJ = 3.7, 0.9  # fp32 at 45 nm, as the paper counts


def fitted_hashers(tokens: Tensor) -> dict[str, Hasher]:
    dim = tokens.shape[-1]
    cosine = FitOptions(target="cosine")
    return {
        "learned (EcoFormer)": KernelHasher(1, dim, BITS, SUPPORT).fit(tokens),
        "learned, cosine target": KernelHasher(1, dim, BITS, SUPPORT).fit(tokens, options=cosine),
        "KLSH": KlshHasher(1, dim, BITS, SUPPORT).fit(tokens),
        "LSH": LshHasher(1, dim, BITS, seed=0),
        "sign": SignHasher(1, dim, BITS),
    }


def quality_table(hashers: dict[str, Hasher], tokens: Tensor) -> Table:
    table = Table(title="Codes of 16 bits on crops that fitting has not seen")
    for column in ("hasher", "|HHᵀ − bY|² (lower is better)", "softmax's top 10 found", "correlation"):
        table.add_column(column)
    n = tokens.shape[2]
    for name, hasher in hashers.items():
        quality = hasher.quality(tokens)
        objective = f"{quality.objective / 1e6:.1f} M"
        table.add_row(name, objective, f"{quality.recall:.1%}", f"{quality.correlation:.2f}")
    table.caption = (
        f"found: among the 10 nearest codes, where 10 of {n} tokens at random would hold {10 / n:.1%}; "
        "correlation: of the codes' products with the cosines"
    )
    return table


def operations(n: int, channels: int) -> dict[str, tuple[int, int]]:
    """Multiplications and additions of one head, projections apart, by the paper's own accounting."""
    m, b = SUPPORT, BITS
    return {
        "softmax": (2 * n * n * channels + n * n, 2 * n * n * channels),
        "hashed": (
            n * (2 * m + m * b + b + 1 + channels),
            n * (2 * m * channels + m * b + 2 * b + 2 * b * channels + channels),
        ),
    }


def median_ms(run: Callable[[], Tensor], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e3


def savings_table(hasher: Hasher, tokens: Tensor) -> Table:
    one = tokens[:1]
    n, channels = one.shape[2:]
    counts = operations(n, channels)
    unit = F.normalize(one, dim=-1)

    def hashed() -> Tensor:
        codes = hasher(one)
        return hash_attention(codes, codes, one)

    times = {
        "softmax": median_ms(lambda: F.scaled_dot_product_attention(unit, unit, one)),
        "hashed": median_ms(hashed),
    }
    table = Table(title=f"One head, {n} tokens of {channels} channels; operations by the paper's accounting")
    for column in ("attention", "multiplications", "additions", "energy (mJ)", "ms here"):
        table.add_column(column, justify="right")
    for name, (mul, add) in counts.items():
        energy = (MUL_PJ * mul + ADD_PJ * add) / 1e9
        table.add_row(name, f"{mul:,}", f"{add:,}", f"{energy:.3g}", f"{times[name]:.2f}")
    return table


def neighbour_picture(hashers: list[Hasher], path: Path) -> None:
    """Crops with one patch marked; beside each, cosines to that patch, then products of codes by hasher."""
    rows = []
    for image, (row, column) in zip(sample_images(), ((20, 28), (22, 25)), strict=True):
        crop = image[150 : 150 + SIZE, 330 : 330 + SIZE]
        side = SIZE // PATCH
        tokens = F.layer_norm(patches(crop, PATCH), (3 * PATCH * PATCH,))
        unit = F.normalize(tokens, dim=-1)
        query = row * side + column
        maps = [unit @ unit[query]]
        for hasher in hashers:
            codes = hasher(tokens[None, None])[0, 0]
            maps.append(codes @ codes[query] / BITS)
        tiles = [_upscale((value.view(side, side, 1).expand(-1, -1, 3) + 1) / 2) for value in maps]
        marked = crop.clone()
        marked[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = torch.tensor(
            [1.0, 0.0, 0.0]
        )
        rows.append(torch.cat([marked, *tiles], dim=1))
    pixels = (torch.cat(rows) * 255).round().to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.numpy()).save(path)


def _upscale(tile: Tensor) -> Tensor:
    return tile.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="where the picture goes")
    arguments = parser.parse_args()
    console = Console()
    fit_on = image_tokens(8, seed=0, part=0)
    judge_by = image_tokens(8, seed=1, part=1)
    with console.status(
        f"fitting on {fit_on.shape[0] * fit_on.shape[2]} patches of china.jpg and flower.jpg"
    ):
        hashers = fitted_hashers(fit_on)
    console.print(quality_table(hashers, judge_by))
    learned = hashers["learned (EcoFormer)"]
    whole = image_tokens(1, size=SIZE, part=0)
    console.print(savings_table(learned, whole))
    example = pack_codes(learned(judge_by))[0, 0, :4].tolist()
    console.print(f"A token is now one integer; the first four are {example}.")
    neighbour_picture([learned, hashers["learned, cosine target"], hashers["LSH"]], arguments.out)
    console.print(
        f"{arguments.out}: crops with one patch in red; beside them how alike the other patches are to it, "
        "by cosine, by learned codes, by codes learned with the cosine target, by LSH. Learned codes are "
        "made to tell the nearest tokens from all others, not to rank those in between: see docs/hashing.md."
    )


if __name__ == "__main__":
    main()
