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
    ours = {row["batch"]: row for row in FIGURES["models"] if row["backend"] == "cpu"}
    assert all(row["checked"]["passed"] for row in ours.values())
    words = (
        f"{ours[1]['ratio_to_sdpa']:.2f} times with one image, {ours[16]['ratio_to_sdpa']:.2f} times with 16"
    )
    assert words in PAGE
