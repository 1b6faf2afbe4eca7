"""CIFAR-100 by one recipe for several mechanisms and seeds: accuracy beside what a picture costs.

    python benchmarks/cifar100.py --root data --out runs --mechanisms softmax eco --seeds 0 1

Runs are separate processes of `ecoformer train`, as many at a time as `--at-once` says; those that are
finished already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import write_result

import ecoformer

MECHANISMS = list(ecoformer.list_attentions())


def main() -> None:
    options = _options()
    runs = [(m, s) for s in options.seeds for m in options.mechanisms]
    began = time.perf_counter()
    _train_all(runs, options)
    print(f"{len(runs)} runs in {time.perf_counter() - began:.0f} s")
    rows = [row for m, s in runs if (row := _row(options.out / _name(m, s), m, s)) is not None]
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        print(
            f"{row['label']:<24} seed {row['seed']}  {row['accuracy']:.2%}  {row['energy_pj'] / 1e9:.3f} mJ"
        )
    settings = {"recipe": options.recipe, "changes": options.set, "at_once": options.at_once}
    print(write_result(options.result, {"settings": settings, "rows": rows}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="folder that holds CIFAR-100")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipe", default="cifar100_short")
    parser.add_argument(
        "--mechanisms", nargs="+", default=MECHANISMS, help="such as eco or eco:bits=8,local=3"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="changes of the recipe")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--result", default="cifar100", help="name of the result file")
    return parser.parse_args()


def _train_all(runs: list[tuple[str, int]], options: argparse.Namespace) -> None:
    waiting, running = list(runs), {}
    while waiting or running:
        while waiting and len(running) < options.at_once:
            run = waiting.pop(0)
            if not (options.out / _name(*run) / "result.json").is_file():
                running[_start(*run, options)] = run
        for process in [p for p in running if p.poll() is not None]:
            mechanism, seed = running.pop(process)
            print(f"{mechanism} seed {seed}: exit status {process.returncode}", flush=True)
        time.sleep(0.2)


def _start(mechanism: str, seed: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    name, _, settings = mechanism.partition(":")
    folder = options.out / _name(mechanism, seed)
    changes = [f"data.root={options.root}", f"attention.name={name}", f"seed={seed}", *options.set]
    if name not in ("eco", "klsh_eco"):
        changes.append("attention.options={}")
    changes += [f"attention.options.{setting}" for setting in settings.split(",") if setting]
    flags = [flag for change in changes for flag in ("--set", change)]
    resume = ["--resume"] if folder.is_dir() else []
    command = [
        sys.executable,
        "-m",
        "ecoformer",
        "train",
        options.recipe,
        *flags,
        "--out",
        str(folder),
        *resume,
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = (options.out / f"{folder.name}.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "2"})


def _row(folder: Path, mechanism: str, seed: int) -> dict[str, Any] | None:
    file = folder / "result.json"
    if not file.is_file():
        print(f"{folder.name} has no result: {(folder.parent / f'{folder.name}.log').read_text()[-300:]}")
        return None
    result = json.loads(file.read_text())
    paper, exact = result["cost"]["paper"], result["cost"]["exact"]
    course = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "mechanism": mechanism.partition(":")[0],
        "label": mechanism,
        "seed": seed,
        "accuracy": result["accuracy"],
        "best_accuracy": result["best_accuracy"],
        "mul": paper["mul"],
        "add": paper["add"],
        "energy_pj": paper["energy_pj"],
        "energy_exact_pj": exact["energy_pj"],
        "parameters": result["parameters"],
        "seconds": round(result["seconds"], 1),
        "course": {str(r["epoch"]): round(r["accuracy"], 4) for r in course if r["split"] == "test"},
    }


def _name(mechanism: str, seed: int) -> str:
    return f"{mechanism.replace(':', '-').replace('=', '').replace(',', '-')}-{seed}"


if __name__ == "__main__":
    main()
