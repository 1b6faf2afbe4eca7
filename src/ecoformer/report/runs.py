"""Finished runs of `ecoformer train`, read back for tables and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecoformer.training.folder import RunFolder


@dataclass(frozen=True)
class Run:
    """What a run left behind: its name, `result.json`, and the lines of `metrics.jsonl`."""

    name: str
    result: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def mechanism(self) -> str:
        """How the model attends."""
        return str(self.result["recipe"]["attention"]["name"])

    @property
    def accuracy(self) -> float:
        """On the test data, 0 to 1."""
        return float(self.result["accuracy"])

    def cost(self, accounting: str = "paper") -> dict[str, float]:
        """Multiplications, additions and energy of a sample."""
        return dict(self.result["cost"][accounting])

    def course(self, split: str, figure: str) -> list[tuple[int, float]]:
        """(step, figure) over the run."""
        return [(m["step"], m[figure]) for m in self.metrics if m.get("split") == split and figure in m]


def read_run(path: str | Path, name: str | None = None) -> Run:
    """The run in a folder."""
    folder = Path(path)
    files = RunFolder(folder)
    try:
        result = json.loads(files.result_file.read_text(encoding="utf-8"))
        lines = files.metrics_file.read_text(encoding="utf-8").splitlines()
        run = Run(name or folder.name, result, [json.loads(line) for line in lines])
        run.mechanism, run.accuracy, run.cost()["energy_pj"]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} holds no finished run: there is no {Path(error.filename).name}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no run of ecoformer train: {type(error).__name__} {error}"
        ) from error
    return run
