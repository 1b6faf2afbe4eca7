"""Accuracy of one recipe for several mechanisms, seeds and settings, beside what a sample costs.

    python benchmarks/accuracy.py cifar100_short --set data.root=data --mechanisms softmax eco --seeds 0 1
    python benchmarks/accuracy.py recall --grid data.options.pairs=4,8,16 --mechanisms softmax eco:local=7

The paper's ablations on CIFAR-100 are mechanisms of the first: hash functions (eco klsh_eco lsh_eco), support
samples (eco:support=10 eco:support=50), bits (eco:bits=8), and other attentions.

Runs are separate processes of `ecoformer train`, as many at a time as `--at-once` says. Those that are
finished are not run again, and must have been made by the same recipe. Results/RECIPE.json is written anew
after every run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import relative, write_result

import ecoformer
from ecoformer.training import load_recipe
from ecoformer.training.folder import CHANGEABLE
from ecoformer.training.recipe import Recipe, check_recipe, differences

NO_MATTER = CHANGEABLE - {"optimiser.lr", "optimiser.clip", "precision"}
"""Settings that may change on resume and do not affect the figures."""


@dataclass(frozen=True)
class Run:
    """A mechanism with its settings, a seed, and values of the grid."""

    mechanism: str
    seed: int
    point: tuple[str, ...]

    @property
    def name(self) -> str:
        pairs = (change.partition("=") for change in self.point)
        words = [self.mechanism, *(key.rpartition(".")[2] + value for key, _, value in pairs), str(self.seed)]
        return "-".join(words).translate(str.maketrans(":,/", "--_", "= "))

    def changes(self) -> list[str]:
        """Changes to the recipe. Another `attention.name` resets its options to their defaults."""
        name, _, settings = self.mechanism.partition(":")
        options = [f"attention.options.{setting}" for setting in settings.split(",") if setting]
        return [f"attention.name={name}", *options, f"seed={self.seed}", *self.point]


def main() -> None:
    options = _options()
    points = list(itertools.product(*map(_values, options.grid)))
    runs = [Run(m, s, p) for s in options.seeds for p in points for m in options.mechanisms]
    _check(runs, options)
    waiting = list(runs)
    running: dict[subprocess.Popen[bytes], Run] = {}
    while waiting or running:
        while waiting and len(running) < options.at_once:
            run = waiting.pop(0)
            if not (options.out / run.name / "result.json").is_file():
                running[_start(run, options)] = run
        for process in [p for p in running if p.poll() is not None]:
            done = running.pop(process)
            print(f"{done.name}: exit status {process.returncode}", flush=True)
            _write(runs, options)
        time.sleep(0.2)
    for row in _write(runs, options):
        print(f"{row['label']:<24} {row['point']} seed {row['seed']}  {row['accuracy']:.2%}")
    missing = _unfinished(runs, options.out)
    if missing:
        raise SystemExit(f"without a result: {', '.join(missing)}; see {options.out}/NAME.log")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, default=Path("out/runs"), help="folder of the runs")
    mechanisms = list(ecoformer.list_attentions())
    parser.add_argument("--mechanisms", nargs="+", default=mechanisms, help="such as eco or eco:bits=8")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe, for all runs")
    parser.add_argument("--grid", nargs="*", default=[], help="key=value,value,...: a run for each value")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--result", help="name of the result file; the recipe's by default")
    return parser.parse_args()


def _values(grid: str) -> list[str]:
    key, _, values = grid.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


def _check(runs: list[Run], options: argparse.Namespace) -> None:
    """Refuse options that would give runs the wrong names."""
    for change in options.set:
        key = change.partition("=")[0]
        if key in ("attention", "attention.name") or f"{key}.".startswith("attention.options."):
            raise SystemExit(f"--set {change} reaches only some runs: write it at the mechanism: eco:local=7")
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise SystemExit(f"two runs would be called {name}: name each mechanism, seed and value once")
    for run in runs:
        file = options.out / run.name / "result.json"
        try:
            recipe = load_recipe(options.recipe, [*options.set, *run.changes()])
        except (ValueError, OSError) as error:
            raise SystemExit(f"{run.name}: {error}") from None
        odd = _difference(file, recipe)
        if odd:
            raise SystemExit(f"{file} is the result of another recipe ({odd}): take another --out")


def _difference(file: Path, recipe: Recipe) -> str | None:
    """How the recipe of a finished run differs from the one asked for; None if it does not."""
    if not file.is_file():
        return None
    found = check_recipe(json.loads(file.read_text())["recipe"], str(file))
    for key, (then, now) in differences(found, recipe).items():
        if key not in NO_MATTER:
            return f"{key} was {then}, not {now}"
    return None


def _start(run: Run, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = options.out / run.name
    flags = [flag for change in (*options.set, *run.changes()) for flag in ("--set", change)]
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    command = [sys.executable, "-m", "ecoformer", "train", options.recipe, *flags, "--out", str(folder)]
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / f"{run.name}.log").open("ab")
    environment = {"OMP_NUM_THREADS": "2"} | os.environ
    return subprocess.Popen([*command, *resume], stdout=log, stderr=log, env=environment)


def _write(runs: list[Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [row for run in runs if (row := _row(run, options.out / run.name)) is not None]
    settings = {"recipe": options.recipe, "changes": list(map(relative, options.set))}
    figures = {"settings": settings, "rows": rows, "unfinished": _unfinished(runs, options.out)}
    write_result(options.result or options.recipe, figures)
    return rows


def _unfinished(runs: list[Run], folder: Path) -> list[str]:
    return [run.name for run in runs if not (folder / run.name / "result.json").is_file()]


def _row(run: Run, folder: Path) -> dict[str, Any] | None:
    file = folder / "result.json"
    if not file.is_file():
        return None
    result = json.loads(file.read_text())
    paper, exact = result["cost"]["paper"], result["cost"]["exact"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("accuracy", "best_accuracy", "test_loss", "parameters", "seconds")
    about = {"mechanism": run.mechanism.partition(":")[0], "label": run.mechanism, "seed": run.seed}
    about["point"] = dict(change.split("=", 1) for change in run.point)
    cost = {name: paper[name] for name in ("mul", "add", "energy_pj")}
    cost["energy_exact_pj"] = exact["energy_pj"]
    course = {f"{r['epoch']:g}": round(r["accuracy"], 4) for r in lines if r["split"] == "test"}
    return about | {name: result[name] for name in kept} | cost | {"course": course}


if __name__ == "__main__":
    main()
