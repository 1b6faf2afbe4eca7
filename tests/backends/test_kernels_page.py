"""The page on kernels shows what the result file holds."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = " ".join((ROOT / "docs" / "kernels.md").read_text().split())


def figures(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]


FIGURES = figures("cpu_kernels")


def test_times_of_attention():
    for row in FIGURES["attention"]:
        shape = ", ".join(map(str, row["shape"]))
        times, ratios = row["in a row"]["median_ms"], row["in a row"]["ratios"]
        cells = [f"{times[name]:.2f} ms" for name in ("sdpa", "eager", "cpu")]
        cells += [f"{ratios[name]:.1f}" for name in ("sdpa / cpu", "eager / cpu")]
        assert f"| {shape} | {' | '.join(cells)} |" in PAGE


def test_times_in_turns():
    one, many = (row["in turns"]["ratios"]["sdpa / cpu"] for row in FIGURES["attention"][:2])
    assert f"In turns with the others it is {one:.0f} and {many:.0f} times" in PAGE
    warm, cold = (FIGURES["attention"][0][how]["median_ms"]["cpu"] for how in ("in a row", "in turns"))
    assert f"a call of {warm:.2f} ms takes {cold:.2f} when" in PAGE


def test_whole_models():
    rows = FIGURES["models"]
    assert all(row["checked"]["passed"] for row in rows)
    for batch, last in {(row["batch"], row["channels_last"]) for row in rows}:
        here = {row["backend"]: row for row in rows if (row["batch"], row["channels_last"]) == (batch, last)}
        order = ("N x N matrix", "sdpa", "eager", "cpu")
        cells = [f"{here[name]['images_per_s']:.1f}" for name in order]
        words = f"batch {batch}, channels {'last' if last else 'first'}"
        assert f"| {words} | {' | '.join(cells)} | {here['cpu']['ratio_to_sdpa']:.2f} |" in PAGE


def test_crossover():
    found = figures("lengths_cpu")["crossover"]
    for row in found:
        assert row["backend"] == ("eager" if row["backward"] else "cpu")
    lengths = {}
    for row in found:
        lengths.setdefault((row["batch"], row["heads"], row["channels"]), {})[row["backward"]] = row["tokens"]
    for shape, tokens in lengths.items():
        assert f"| {', '.join(map(str, shape))} | {tokens[False]} | {tokens[True]} |" in PAGE
    assert (ROOT / "docs" / "figures" / "lengths_cpu.svg").is_file()
