"""benchmarks/compare.py reports the runs that were asked for, and no others."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import ecoformer
from ecoformer.training import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The script's `main`, in whose place of runs there is `finish`; it returns the rows that are written."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("compare")
    written = []
    monkeypatch.setattr(script, "write_result", lambda name, figures: written.append(figures))
    monkeypatch.setattr(script, "_start", lambda run, options: finish(run, options, len(started(tmp_path))))

    def main(*arguments, recipe="recall", mechanisms=("eco",)):
        command = ["compare.py", recipe, "--out", str(tmp_path), "--mechanisms", *mechanisms, *arguments]
        monkeypatch.setattr(sys, "argv", command)
        script.main()
        return written[-1]["rows"]

    return main


class Finished:
    returncode = 0

    def poll(self):
        return self.returncode


def finish(run, options, number):
    """A run that is over at once, with an accuracy that says the how manieth it was."""
    recipe = load_recipe(options.recipe, [*options.set, *run.changes()])
    cost = {kind: {"mul": 0, "add": 0, "energy_pj": 0.0} for kind in ("paper", "exact")}
    result = {"recipe": recipe.model_dump(mode="json"), "cost": cost, "parameters": 1, "seconds": 1.0}
    result |= {"accuracy": number / 100, "best_accuracy": 0.0, "test_loss": 0.0}
    folder = options.out / run.name
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("")
    return Finished()


def started(out):
    return sorted(file.parent.name for file in out.glob("*/result.json"))


def refused(compare, *arguments, **kwargs):
    with pytest.raises(SystemExit) as caught:
        compare(*arguments, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_finished_runs_are_not_run_again(compare, tmp_path):
    first = compare("--set", "schedule.steps=5", "--seeds", "0", "1")
    assert [row["accuracy"] for row in first] == [0.0, 0.01]
    harmless = ["data.root=elsewhere", "data.workers=1", "log_every=1", "keep=9"]
    assert compare("--set", "schedule.steps=5", *harmless, "--seeds", "0", "1") == first
    assert len(compare("--set", "schedule.steps=5", mechanisms=["eco", "softmax"])) == 2
    assert started(tmp_path) == ["eco-0", "eco-1", "softmax-0"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("schedule.steps=6", "schedule.steps was 5, not 6"),
        ("optimiser.lr=0.5", "optimiser.lr was 0.001, not 0.5"),
        ("precision=bf16", "precision was fp32, not bf16"),
        ("data.options.pairs=3", "data.options.pairs was 8, not 3"),
    ],
)
def test_results_of_other_settings_are_refused(compare, tmp_path, change, expected):
    same = ["--set", "schedule.steps=5", "data.options.pairs=8"]
    compare(*same)
    line = refused(compare, *same, change, mechanisms=["softmax", "eco"])
    assert expected in line
    assert "take another --out" in line
    assert started(tmp_path) == ["eco-0"], "nothing is started before all is checked"


def test_results_of_another_recipe_are_refused(compare):
    compare()
    assert "take another --out" in refused(compare, recipe="digits")


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("optimiser.lr=1.0e-3,2.0e-3", ["eco-lr1.0e-3-0", "eco-lr2.0e-3-0"]),
        ("mask_rate=0.5,0.25", ["eco-mask_rate0.25-0", "eco-mask_rate0.5-0"]),
        ("data.options.pairs=8,16", ["eco-pairs16-0", "eco-pairs8-0"]),
    ],
)
def test_every_value_of_a_grid_is_a_run(compare, tmp_path, grid, names):
    rows = compare("--grid", grid)
    assert started(tmp_path) == names
    assert [row["accuracy"] for row in rows] == [0.0, 0.01]


def test_runs_of_one_name_are_refused(compare, tmp_path):
    assert "two runs would be called eco-starta_b-0" in refused(compare, "--grid", "start=a/b,a_b")
    assert "two runs would be called eco-0" in refused(compare, mechanisms=["eco", "eco"])
    assert started(tmp_path) == []


@pytest.mark.parametrize("key", ["attention.options.bits=8", "attention.options={}", "attention.name=eco"])
def test_mechanisms_have_their_options_written_at_them(compare, tmp_path, key):
    assert "write it at the mechanism: eco:local=7" in refused(compare, "--set", key)
    compare("--set", "attention.layers=all", mechanisms=["eco:bits=8"])
    assert started(tmp_path) == ["eco-bits8-0"]


def test_only_the_recipes_own_mechanism_takes_its_options(compare, tmp_path):
    compare(mechanisms=["eco", "klsh_eco", "softmax", "eco:bits=8,local=3"], recipe="cifar100_short")
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in started(tmp_path)]
    assert [result["recipe"]["attention"]["options"] for result in results] == [
        {"bits": 16, "support": 25},
        {"bits": 8, "support": 25, "local": 3},
        {},
        {},
    ]
    recipes_own = ecoformer.create_attention("eco", 8, 2, **results[0]["recipe"]["attention"]["options"])
    klsh = ecoformer.create_attention("klsh_eco", 8, 2)
    shapes = [{key: value.shape for key, value in m.hasher.state_dict().items()} for m in (recipes_own, klsh)]
    assert shapes[0] == shapes[1], "as many bits and support samples, or they could not be compared"


def test_a_wrong_setting_is_one_line(compare):
    assert "optimiser.rate" in refused(compare, "--set", "optimiser.rate=1")
    assert "'recal'" in refused(compare, recipe="recal")


def test_a_run_without_a_result_is_named_by_the_exit_status(compare, monkeypatch, tmp_path):
    script = importlib.import_module("compare")

    def start(run, options):
        return Finished() if run.seed == 1 else finish(run, options, 1)

    monkeypatch.setattr(script, "_start", start)
    assert "without a result: eco-1;" in refused(compare, "--seeds", "0", "1")
    assert started(tmp_path) == ["eco-0"]
