"""Result files: what ran, on what, at which commit, and the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ecoformer.environment import hardware, versions
from ecoformer.third_party import repair_torchvision

repair_torchvision()  # for all benchmarks, which import this file first
RESULTS = Path(__file__).resolve().parent.parent / "results"


def write_result(name: str, figures: Any) -> Path:
    """Write `results/NAME.json`, or a file in the folder ECOFORMER_RESULTS, and return its path."""
    record = {
        "command": "python " + " ".join(map(relative, sys.argv)),
        "commit": _commit(),
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "figures": figures,
    }
    folder = Path(os.environ.get("ECOFORMER_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def figures_of(name: str) -> Any:
    """The figures in `results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def relative(argument: str) -> str:
    """Project files relative to its root, other files by name, so that results hold no machine paths.

    This includes settings such as data.root=FOLDER.
    """
    key, sign, value = argument.rpartition("=")
    path, root = Path(value).resolve(), RESULTS.parent
    if not value or not path.exists():
        return argument
    return key + sign + (str(path.relative_to(root)) if path.is_relative_to(root) else path.name)


def _commit() -> str:
    """From the environment variable ECOFORMER_COMMIT, for copies without history, or from git."""
    if os.environ.get("ECOFORMER_COMMIT"):
        return os.environ["ECOFORMER_COMMIT"]

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent)
        return run.stdout.strip()

    # A benchmark itself writes results and figures.
    changed = git("status", "--porcelain", "--", ".", ":!results", ":!docs/figures")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")
