"""The result file of the cost page is what is computed, and the page's mechanism is counted."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch

import ecoformer
import ecoformer.models

ROOT = Path(__file__).resolve().parents[2]
FIGURES = json.loads((ROOT / "results" / "accounting.json").read_text())["figures"]["eco"]
HOW = {"paper": {}, "exact": {"accounting": "exact"}, "cpu": {"accounting": "exact", "backend": "cpu"}}


@pytest.mark.parametrize("how", HOW)
def test_the_file_is_what_is_computed(how):
    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention="eco")
    total = ecoformer.cost(model, (1, 3, 224, 224), **HOW[how]).total.to_dict()
    assert FIGURES[how]["total"] == total
    assert {kind: sum(line[how][kind] for line in FIGURES["lines"]) for kind in total} == total


def test_the_mechanism_of_the_page_is_counted():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cost.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(next(text for text in blocks if "MeanAttention" in text), "cost.md", "exec"), names)
    ledger = ecoformer.cost(names["MeanAttention"](8, 2), (3, 5, 8))
    assert ledger.uncounted == ()
    assert next(row.counts for row in ledger.rows if row.kind == "mean").add == 3 * 5 * 8
