"""The tables of the cost page are those of its result file, and the file is what is computed."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch

import ecoformer
import ecoformer.models

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cost.md").read_text()
FIGURES = json.loads((ROOT / "results" / "accounting.json").read_text())["figures"]
HOW = {"paper": {}, "exact": {"accounting": "exact"}, "cpu": {"accounting": "exact", "backend": "cpu"}}

KINDS = {"paper": ("mul", "add"), "exact": ("mul", "add", "exp", "bytes"), "cpu": ("mul", "add", "lookup")}


def table_row(*cells):
    return f"| {' | '.join(cells)} |"


def millions(*numbers):
    return [f"{x / 1e6:,.1f}" if x else "" for x in numbers]


def rows():
    for mechanism, hows in (("softmax", ("paper", "exact")), ("eco", tuple(HOW))):
        for how in hows:
            found = FIGURES[mechanism][how]
            counts = millions(*(found["total"][kind] for kind in ("mul", "add", "lookup", "exp", "bytes")))
            energies = [f"{energy / 1e9:.2f}" for energy in found["energy_pj"].values()]
            yield table_row(mechanism, how, *counts, *energies)
    for how in HOW:
        shares = (FIGURES["savings_of_attention"][how], *FIGURES["savings"][how].values())
        yield table_row(how, *(f"{share:.1%}" for share in shares))
    total = {"line": "total"} | {how: FIGURES["eco"][how]["total"] for how in HOW}
    for line in (*FIGURES["eco"]["lines"], total):
        yield table_row(line["line"], *millions(*(line[how][kind] for how in HOW for kind in KINDS[how])))
    for row in FIGURES["native"]:
        energies = [f"{row[name] / 1e9:.2f}" for name in ("native", "softmax", "eco")]
        yield table_row(str(row["resolution"]), *energies, f"{1 - row['eco'] / row['native']:.0%}")
    for status, count in ({"differs": 0} | FIGURES["tables"]).items():
        yield f"| {status} | {count} |"


def test_the_page_has_the_figures_of_the_file():
    assert [row for row in rows() if row not in PAGE] == []


@pytest.mark.parametrize("how", HOW)
def test_the_file_is_what_is_computed(how):
    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention="eco")
    found = FIGURES["eco"]
    assert ecoformer.cost(model, (1, 3, 224, 224), **HOW[how]).total.to_dict() == found[how]["total"]
    sums = {kind: sum(line[how][kind] for line in found["lines"]) for kind in found[how]["total"]}
    assert sums == found[how]["total"]


def test_the_mechanism_of_the_page_is_counted():
    block = next(
        text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "MeanAttention" in text
    )
    names = {}
    exec(compile(block, "cost.md", "exec"), names)
    ledger = ecoformer.cost(names["MeanAttention"](8, 2), (3, 5, 8))
    assert ledger.uncounted == ()
    assert next(row.counts for row in ledger.rows if row.kind == "mean").add == 3 * 5 * 8
