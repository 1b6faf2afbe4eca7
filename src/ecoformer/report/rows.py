"""Rows of figures: those printed in the paper, and those in result files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

_LABELS = ("label", "mechanism", "method", "attention")
_ENERGIES = {"energy_pj": 1.0, "energy": 1.0, "energy_bpj": 1e9}
_ACCURACIES = ("accuracy", "top1")


def printed_rows(table: str) -> list[dict[str, str]]:
    """One of the paper's tables, as it is printed."""
    folder = files("ecoformer.report").joinpath("printed")
    names = sorted(path.name.removesuffix(".csv") for path in folder.iterdir() if path.name.endswith(".csv"))
    if table not in names:
        raise ValueError(f"the paper has no table {table!r}: there are {', '.join(names)}")
    return list(csv.DictReader(folder.joinpath(f"{table}.csv").read_text(encoding="utf-8").splitlines()))


def file_rows(path: str | Path) -> list[Mapping[str, Any]]:
    """The rows of a CSV file or of a JSON file: a list of objects, an object with `rows`, or one object.

    A file of ours has them under `figures`.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"there is no result file {source}")
    text = source.read_text(encoding="utf-8")
    if source.suffix.lower() == ".csv":
        return list(csv.DictReader(text.splitlines()))
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"result file {source} is not valid JSON: {error}") from error
    for key in ("figures", "rows"):
        if isinstance(content, Mapping) and key in content:
            content = content[key]
    rows = [content] if isinstance(content, Mapping) else content
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"result file {source} must hold an object or a list of objects")
    return list(rows)


def accuracy_rows(rows: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Rows as `accuracy_figure` takes them: label, energy_pj, accuracy in per cent.

    The label is `label`, `mechanism`, `method` or `attention`; the energy `energy_pj` or `energy` in pJ, or
    `energy_bpj` in 10⁹ pJ; the accuracy `accuracy` or `top1`. Where no accuracy is above 1, they are
    fractions of 1.
    """
    found: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        where = f"row {i} of {source}"
        energy = _field(row, tuple(_ENERGIES), where)
        accuracy = _number(row, _field(row, _ACCURACIES, where), where)
        label = str(row[_field(row, _LABELS, where)])
        facts = {"energy_pj": _number(row, energy, where) * _ENERGIES[energy], "accuracy": accuracy}
        found.append({"label": label} | facts)
    if all(row["accuracy"] <= 1 for row in found):
        return [row | {"accuracy": 100 * row["accuracy"]} for row in found]
    return found


def _field(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        raise ValueError(
            f"{where} lacks {' or '.join(names)}; it has {', '.join(map(str, row)) or 'nothing'}"
        )
    return name


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: {name} must be a finite number from 0, got {row[name]!r}")
    return value
