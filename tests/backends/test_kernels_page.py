"""The page on kernels shows what the result file holds."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
FIGURES = json.loads((ROOT / "results" / "cpu_kernels.json").read_text())["figures"]


def test_times_of_attention():
    for row in FIGURES["attention"]:
        shape = ", ".join(map(str, row["shape"]))
        times, ratios = row["in a row"]["median_ms"], row["in a row"]["ratios"]
        cells = [f"{times[name]:.2f} ms" for name in ("sdpa", "eager", "cpu")]
        cells += [f"{ratios[name]:.1f}" for name in ("sdpa / cpu", "eager / cpu")]
        assert f"| {shape} | {' | '.join(cells)} |" in PAGE


def test_whole_models():
    rows = FIGURES["models"]
    assert all(row["checked"]["passed"] for row in rows)
    for batch, last in {(row["batch"], row["channels_last"]) for row in rows}:
        here = {row["backend"]: row for row in rows if (row["batch"], row["channels_last"]) == (batch, last)}
        order = ("N x N matrix", "sdpa", "eager", "cpu")
        cells = [f"{here[name]['images_per_s']:.1f}" for name in order]
        words = f"batch {batch}, channels {'last' if last else 'first'}"
        assert f"| {words} | {' | '.join(cells)} | {here['cpu']['ratio_to_sdpa']:.2f} |" in PAGE
