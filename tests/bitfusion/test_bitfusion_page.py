"""The page on BitFusion quotes the result file, and the result file is what is computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ecoformer.bitfusion import attention_layer, printed_table, simulate_all

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bitfusion.md").read_text()
FIGURES = json.loads((ROOT / "results" / "bitfusion.json").read_text())["figures"]


def test_the_papers_table():
    for row, now in zip(FIGURES["table"], printed_table(), strict=True):
        assert row["energy_nj"] == pytest.approx(now["energy_nj"])
        difference = f"{row['energy_nj'] / row['printed_energy'] - 1:+.1%}".replace("-0.0%", "+0.0%")
        cells = (
            row["method"],
            f"{row['latency_ms']:.4f}",
            f"{row['printed_latency_ms']:.4f}",
            f"{row['energy_nj']:,.2f}",
            f"{row['printed_energy']:,.2f}",
            difference,
            "the paper's" if row["reading"] == "printed" else "ours",
        )
        assert f"| {' | '.join(cells)} |" in PAGE


def test_the_whole_layer():
    for name, row in FIGURES["layer"].items():
        assert row["cycles"] == simulate_all(attention_layer(name)).cycles
        shares = " | ".join(f"{row[key]:.0%}" for key in ("stalls", "dram", "buffers", "array"))
        assert f"| {name} | {row['cycles']:,} | {row['ms']:.2f} | {row['mj']:.2f} | {shares} |" in PAGE


def test_whole_models():
    for name, row in FIGURES["models"].items():
        numbers = f"{row['macs'] / 1e6:,.1f} | {row['ms']:.2f} | {row['mj']:.2f} | {row['attention']:.0%}"
        assert f"| {name} | {numbers} |" in PAGE
        assert 0.85 < row["dram"] < 0.95


def test_codes():
    for name, rows in FIGURES["codes"].items():
        one, eight = (f"{rows[bits]['cycles']:,} | {rows[bits]['uj']:.2f}" for bits in ("1", "8"))
        assert f"| {name} | {one} | {eight} |" in PAGE
    narrow, wide = (FIGURES["eco_by_code_bits"][bits]["mj"] for bits in ("1", "8"))
    assert f"1 bit instead of 8 saves {1 - narrow / wide:.1%} of the energy" in PAGE


def test_snippets_run():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "bitfusion.md", "exec"), {})
