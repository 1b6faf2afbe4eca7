"""The paper's tables with the printed figure, ours, and the difference, cell by cell.

The printed figures are those of EcoFormer (Liu et al., NeurIPS 2022), one file per table under `printed/`.
Ours come from the ledger's paper accounting and from the BitFusion model, computed on demand. Tables about
CIFAR-100 count a head of 100 classes: with 1000, two of their energies come out 0.01 higher.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from ecoformer.report.expected import NOTES, OPEN, SLIPS
from ecoformer.report.ours import OURS, Row

Status = Literal["equal", "differs", "open", "slip", "not ours"]

STATUSES: dict[Status, str] = {
    "equal": "ours is the printed figure, to its last digit",
    "differs": "ours is different",
    "open": "the paper leaves settings open; ours are named below the table",
    "slip": "the print contradicts itself or its own rule; ours is what the rule gives",
    "not ours": "measured or quoted by the authors: printed only",
}

_TITLES = {
    "operation_energy_45nm": "Energy and area of operations at 45 nm",
    "imagenet_main": "ImageNet-1K: main results",
    "attention_only": "Attention layers alone",
    "imagenet_from_scratch": "ImageNet-1K: trained from scratch",
    "throughput": "Throughput on a GPU",
    "long_range_arena": "Long Range Arena",
    "cifar100_attentions": "CIFAR-100: efficient attentions in PVTv2-B0",
    "cifar100_binarization": "CIFAR-100: quantisation against hashing",
    "cifar100_hash_functions": "CIFAR-100: hash functions in PVTv2-B0",
    "cifar100_support_samples": "CIFAR-100: support samples m in PVTv2-B0",
    "bitfusion": "An attention layer on BitFusion",
}
_KEYS = ("model", "method", "operation", "m")


@dataclass(frozen=True)
class Cell:
    """One figure: as printed, ours if there is one, and how the two compare."""

    row: str
    column: str
    text: str
    ours: float | None
    status: Status
    note: str = ""

    @property
    def printed(self) -> float:
        """The printed figure as a number."""
        return float(self.text)

    @property
    def digits(self) -> int:
        """Printed digits after the point."""
        return len(self.text.partition(".")[2])

    @property
    def difference(self) -> float | None:
        """Ours, rounded to the printed digits, less the printed figure."""
        return None if self.ours is None else round(round(self.ours, self.digits) - self.printed, self.digits)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; `ours` is not rounded."""
        facts = {"row": self.row, "column": self.column, "printed": self.printed, "ours": self.ours}
        return facts | {"difference": self.difference, "status": self.status, "note": self.note}


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, its cells in printed order, and notes on the entire table."""

    name: str
    title: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, list[Cell]]]:
        """Rows in printed order."""
        for start in range(0, len(self.cells), len(self.columns)):
            cells = list(self.cells[start : start + len(self.columns)])
            yield cells[0].row, cells

    def remarks(self) -> list[str]:
        """Slips and open settings, one line each, then notes on the entire table."""
        columns: dict[tuple[str, str, str], list[str]] = {}
        for cell in self.cells:
            if cell.note:
                columns.setdefault((cell.status, cell.row, cell.note), []).append(cell.column)
        slips = [
            f"slip in print, {row}, {', '.join(names)}: {note}"
            for (status, row, note), names in columns.items()
            if status == "slip"
        ]
        opens = [f"open, {row}: {note}" for status, row, note in columns if status == "open"]
        return [*slips, *opens, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Title, cells and remarks."""
        cells = [cell.to_dict() for cell in self.cells]
        return {"name": self.name, "title": self.title, "cells": cells, "remarks": self.remarks()}


def list_tables() -> list[str]:
    """Names of the paper's tables."""
    return list(_TITLES)


def paper_table(name: str) -> PaperTable:
    """One of the paper's tables, with our figures beside the printed ones."""
    if name not in _TITLES:
        close = difflib.get_close_matches(name, _TITLES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_TITLES)}"
        raise ValueError(f"no table is named {name!r}: {hint}")
    printed = printed_rows(name)
    ours = OURS[name](printed) if name in OURS else [{} for _ in printed]
    cells = [
        _cell(name, row, column, text, figures.get(column))
        for row, figures in zip(printed, ours, strict=True)
        for column, text in row.items()
        if column not in _KEYS
    ]
    columns = tuple(column for column in printed[0] if column not in _KEYS)
    return PaperTable(name, _TITLES[name], columns, tuple(cells), NOTES.get(name, ()))


def printed_rows(table: str) -> list[dict[str, str]]:
    """One of the paper's tables, as it is printed."""
    text = files("ecoformer.report").joinpath(f"printed/{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _cell(table: str, row: Row, column: str, text: str, ours: float | None) -> Cell:
    key = " ".join(f"m={row[k]}" if k == "m" else row[k] for k in _KEYS if k in row)
    if ours is None:
        return Cell(key, column, text, None, "not ours")
    if (table, key) in OPEN:
        return Cell(key, column, text, ours, "open", OPEN[table, key])
    equal = Cell(key, column, text, ours, "equal")
    if not equal.difference:
        return equal
    note = SLIPS.get((table, key, column)) or SLIPS.get((table, key, "*"))
    return Cell(key, column, text, ours, "slip" if note else "differs", note or "")
