"""The result file of the page on BitFusion is what is computed, and the page's snippet runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ecoformer.bitfusion import printed_table, simulate_layer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bitfusion.md").read_text()
FIGURES = json.loads((ROOT / "results" / "bitfusion.json").read_text())["figures"]


def test_the_file_is_what_is_computed():
    for row, now in zip(FIGURES["table"], printed_table(), strict=True):
        assert row["energy_nj"] == pytest.approx(now["energy_nj"])
    for name, row in FIGURES["layer"].items():
        assert row["cycles"] == simulate_layer(name).cycles


def test_snippets_run():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    exec(compile(block, "bitfusion.md", "exec"), {})
