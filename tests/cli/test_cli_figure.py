"""`ecoformer figure` as a user meets it."""

import importlib
import json
from dataclasses import replace
from functools import partial

import pytest

from ecoformer.accounting import cost

figure_command = importlib.import_module("ecoformer.cli.figure")  # the name in the package is the command


@pytest.fixture
def cli(run):
    return partial(run, "figure")


@pytest.mark.parametrize(
    "arguments",
    [
        ("shares", "--models", "pvt_v2_b0", "--resolution", "64"),
        ("shares", "--models", "pvt_v2_b0", "--accounting", "exact", "--compare", "native"),
    ],
    ids=" ".join,
)
def test_pictures(cli, tmp_path, arguments):
    status, out, err = cli(*arguments, "--out", "a.png")
    assert (status, out, err) == (0, "wrote a.png\n", "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_ones_own(cli, tmp_path):
    rows = [
        {"label": "eco", "energy_pj": 2e9, "accuracy": 0.71},
        {"label": "mine", "energy_pj": 3e9, "accuracy": 0.7},
    ]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    status, _, _ = cli("accuracy", "r.json", "--out", "a.svg")
    assert status == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_every_command_shows_an_example(cli):
    for command in ("shares", "accuracy"):
        status, out, _ = cli(command, "--help")
        assert status == 0
        assert f"ecoformer figure {command}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("shares", "--out", "a.jpg"), "a.jpg must end in .png, .svg, .pdf, got '.jpg'"),
        (("shares", "--out", "nowhere/a.png"), "there is no folder nowhere"),
        (("accuracy", "nowhere.json", "--out", "a.png"), "nowhere.json"),
        (("shares", "--models", "pvt_v2_b9", "--out", "a.png"), "pvt_v2_b9"),
        (("shares", "--compare", "nope", "--out", "a.png"), "unknown attention 'nope'"),
    ],
)
def test_refusals(cli, tmp_path, arguments, words):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ecoformer: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_leaves_nothing_out_in_silence(cli, monkeypatch):
    def lacking(*arguments, **options):
        return replace(cost(*arguments, **options), uncounted=("stages.0.blocks.0.attn (eco)",))

    monkeypatch.setattr(figure_command, "cost", lacking)
    status, _, err = cli("shares", "--models", "pvt_v2_b0", "--compare", "eco", "--out", "a.png")
    assert status == 2
    assert "eco: the paper accounting does not count stages.0.blocks.0.attn" in err
    assert "try --accounting exact" in err
