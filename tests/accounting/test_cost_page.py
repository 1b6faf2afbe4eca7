"""The page about cost says what its result file says, line by line."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("mul", "add", "shift", "lookup", "compare", "exp", "bytes")


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "cost.md").read_text()


@pytest.fixture(scope="module")
def figures():
    return json.loads((ROOT / "results" / "accounting.json").read_text())["figures"]


def row_of(name, paper, exact):
    numbers = [paper["mul"], paper["add"], *(exact[kind] for kind in ("mul", "add", "exp", "bytes"))]
    return f"| {name} | {' | '.join(f'{x / 1e6:,.1f}' if x else '' for x in numbers)} |"


def test_lines(page, figures):
    same = {line["line"]: line for line in figures["eco"]["lines"]}
    for line in figures["eco"]["lines"]:
        assert row_of(line["line"], line["paper"], line["exact"]) in page
    for line in figures["softmax"]["lines"]:
        if line != same[line["line"]]:
            assert row_of(line["line"], line["paper"], line["exact"]) in page
    for mechanism in ("softmax", "eco"):
        found = figures[mechanism]
        assert row_of("total", found["paper"]["total"], found["exact"]["total"]) in page


@pytest.mark.parametrize("mechanism", ["softmax", "eco"])
@pytest.mark.parametrize("accounting", ["paper", "exact"])
def test_lines_add_up(figures, mechanism, accounting):
    found = figures[mechanism]
    sums = {kind: sum(line[accounting][kind] for line in found["lines"]) for kind in KINDS}
    assert sums == found[accounting]["total"]


def test_savings_of_attention(page, figures):
    paper, exact = (f"{figures['savings_of_attention'][a]:.1%}" for a in ("paper", "exact"))
    assert f"of attention alone, {paper} and {exact}." in page


def test_cells_of_the_tables(page, figures):
    cells = {"differs": 0} | figures["tables"]
    assert set(cells) == {"equal", "differs", "open", "slip", "not ours"}
    for status, count in cells.items():
        assert f"| {status} | {count} |" in page
