"""The page about cost says what its result file says, line by line."""

import json
from pathlib import Path

import pytest
import timm
import torch

import ecoformer
import ecoformer.models
from ecoformer.accounting.counts import Counts
from ecoformer.accounting.mechanisms import eco, eco_cpu
from ecoformer.accounting.mechanisms.parts import Heads

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


TABLES = ("fp32-45nm", "fp32-45nm-sram", "fp32-45nm-dram")


@pytest.fixture(scope="module")
def on_cpu():
    with torch.device("meta"):
        model = timm.create_model("ecoformer_pvt_v2_b0", attention="eco")
    how = {"accounting": "exact", "backend": "cpu"}
    return [ecoformer.cost(model, (1, 3, 224, 224), energy=table, **how) for table in TABLES]


def test_the_cpu_backend(page, figures, on_cpu):
    total = on_cpu[0].total
    counts = [f"{getattr(total, kind) / 1e6:,.1f}" for kind in ("mul", "add", "exp", "compare", "bytes")]
    energies = [ledger.energy_pj for ledger in on_cpu]
    cells = [*counts, *(f"{energy / 1e9:.2f}" for energy in energies)]
    assert f"| eco | exact, `cpu` | {' | '.join(cells)} |" in page
    softmax = figures["softmax"]["exact"]["energy_pj"].values()
    savings = [f"{1 - ours / theirs:.1%}" for ours, theirs in zip(energies, softmax, strict=True)]
    assert f"| saving | exact, `cpu` |  |  |  |  |  | {' | '.join(savings)} |" in page
    assert (
        f"attention moves {on_cpu[0].of('attention').bytes / 1e6:.0f} million bytes, and the saving" in page
    )


def test_what_the_cpu_kernels_get_back(page):
    kernels, eager, hashing = Counts(), Counts(), []
    for heads, tokens in ((1, 3136), (2, 784), (5, 196)):
        h = Heads(1, heads, tokens, 32)
        digit = eco_cpu.digit_of(16, 32, tokens)
        steps = eco_cpu.sums(h, 16, digit) + eco_cpu.tables(h, 16, digit) + eco_cpu.read(h, 16, digit)
        kernels, eager = kernels + steps * 2, eager + (eco.sums(h, 16) + eco.read(h, 16, False)) * 2
        both = eco_cpu.hashing(h, 16, 25), eco.kernel(h, 16, 25, False)
        hashing.append([2 * counts.mul / 1e6 for counts in both])
    text = " ".join(page.split())
    add, lookup, mul = (f"{getattr(kernels, kind) / 1e6:.1f} million" for kind in ("add", "lookup", "mul"))
    assert f"sums and read take {add} additions, {lookup} look-ups and {mul} multiplications, " in text
    add, mul = (f"{getattr(eager, kind) / 1e6:.1f} million" for kind in ("add", "mul"))
    assert f"where eager PyTorch has {add} additions and {mul} multiplications" in text
    ours, theirs = (sum(numbers) for numbers in zip(*hashing, strict=True))
    assert f"{ours:.1f} million times against {theirs:.1f}," in text
