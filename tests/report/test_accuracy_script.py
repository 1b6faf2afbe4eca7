"""benchmarks/accuracy.py reports the runs that were asked for, and no others."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from ecoformer.training import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Finished:
    returncode = 0

    def poll(self):
        return self.returncode


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The script's `main`, with runs that are over at once; it returns the rows that are written."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("accuracy")
    written = []

    def start(run, options):
        """A run with an accuracy that says the how manieth it was; seed 9 fails."""
        if run.seed != 9:
            recipe = load_recipe(options.recipe, [*options.set, *run.changes()])
            cost = {kind: {"mul": 0, "add": 0, "energy_pj": 0.0} for kind in ("paper", "exact")}
            result = {"recipe": recipe.model_dump(mode="json"), "cost": cost, "parameters": 1, "seconds": 1.0}
            result |= {"accuracy": len(started(tmp_path)) / 100, "best_accuracy": 0.0, "test_loss": 0.0}
            (options.out / run.name).mkdir()
            (options.out / run.name / "result.json").write_text(json.dumps(result))
            (options.out / run.name / "metrics.jsonl").write_text("")
        return Finished()

    monkeypatch.setattr(script, "write_result", lambda name, figures: written.append(figures))
    monkeypatch.setattr(script, "_start", start)

    def main(*arguments, recipe="recall", mechanisms=("eco",)):
        command = ["accuracy.py", recipe, "--out", str(tmp_path), "--mechanisms", *mechanisms, *arguments]
        monkeypatch.setattr(sys, "argv", command)
        script.main()
        return written[-1]["rows"]

    return main


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


def test_results_of_other_settings_are_refused(compare, tmp_path):
    compare("--set", "schedule.steps=5")
    line = refused(compare, "--set", "optimiser.lr=0.5", mechanisms=["softmax", "eco"])
    assert "optimiser.lr was 0.001, not 0.5" in line
    assert "two runs would be called eco-0" in refused(compare, mechanisms=["eco", "eco"])
    assert started(tmp_path) == ["eco-0"], "nothing is started before all is checked"


def test_every_value_of_a_grid_is_a_run(compare, tmp_path):
    rows = compare("--grid", "data.options.pairs=8,16")
    assert started(tmp_path) == ["eco-pairs16-0", "eco-pairs8-0"]
    assert [row["point"] for row in rows] == [{"data.options.pairs": "8"}, {"data.options.pairs": "16"}]


def test_mechanisms_have_their_options_written_at_them(compare, tmp_path):
    assert "write it at the mechanism" in refused(compare, "--set", "attention.options.bits=8")
    compare(mechanisms=["eco:bits=8,local=3", "klsh_eco"], recipe="cifar100_short")
    assert started(tmp_path) == ["eco-bits8-local3-0", "klsh_eco-0"]
    result = json.loads((tmp_path / "eco-bits8-local3-0" / "result.json").read_text())
    assert result["recipe"]["attention"]["options"] == {"bits": 8, "support": 25, "local": 3}


def test_a_run_without_a_result_is_named_by_the_exit_status(compare, tmp_path):
    assert "without a result: eco-9;" in refused(compare, "--seeds", "0", "9")
    assert started(tmp_path) == ["eco-0"]
