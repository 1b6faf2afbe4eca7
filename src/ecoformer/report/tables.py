"""The paper's tables with the printed figure, ours, and the difference, cell by cell.

The printed figures are those of EcoFormer (Liu et al., NeurIPS 2022), one file per table under `printed/`.
`printed/remarks.csv` lists slips in print, settings that the paper leaves open, and notes; none changes a
figure. Ours come from the ledger's paper accounting and from the BitFusion model, computed on demand. Tables
about CIFAR-100 count a head of 100 classes: with 1000, two of their energies come out 0.01 higher.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from ecoformer.report.ours import TABLES

Status = Literal["equal", "differs", "open", "slip", "not ours"]

STATUSES: dict[Status, str] = {
    "equal": "ours is the printed figure, to its last digit",
    "differs": "ours is different",
    "open": "the paper leaves settings open; ours are named below the table",
    "slip": "the paper contradicts itself or its own rule; ours is what the rule gives",
    "not ours": "measured or quoted by the authors: printed only",
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
        found: dict[tuple[str, str, str], list[str]] = {}
        for cell in self.cells:
            if cell.note:
                found.setdefault((cell.status, cell.row, cell.note), []).append(cell.column)
        lines = [
            f"{status}, {row}" + (f", {', '.join(columns)}" if status == "slip" else "") + f": {note}"
            for (status, row, note), columns in found.items()
        ]
        return [*lines, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Title, cells and remarks."""
        cells = [cell.to_dict() for cell in self.cells]
        return {"name": self.name, "title": self.title, "cells": cells, "remarks": self.remarks()}


def list_tables() -> list[str]:
    """Names of the paper's tables."""
    return list(TABLES)


def paper_table(name: str) -> PaperTable:
    """One of the paper's tables, with our figures beside the printed ones."""
    if name not in TABLES:
        raise ValueError(f"no table is named {name!r}: there are {', '.join(TABLES)}")
    title, compute = TABLES[name]
    printed = printed_rows(name)
    remarks = [remark for remark in printed_rows("remarks") if remark["table"] == name]
    columns = tuple(column for column in printed[0] if column not in _KEYS)
    cells = []
    for row in printed:
        ours = compute(row)
        key = " ".join(f"m={row[k]}" if k == "m" else row[k] for k in _KEYS if k in row)
        own = [remark for remark in remarks if remark["row"] == key]
        cells += [_cell(key, column, row[column], ours.get(column), own) for column in columns]
    notes = tuple(remark["note"] for remark in remarks if remark["status"] == "note")
    return PaperTable(name, title, columns, tuple(cells), notes)


def printed_rows(table: str) -> list[dict[str, str]]:
    """One of the paper's tables, as it is printed; or the remarks."""
    text = files("ecoformer.report").joinpath(f"printed/{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _cell(row: str, column: str, text: str, ours: float | None, remarks: list[dict[str, str]]) -> Cell:
    if ours is None:
        return Cell(row, column, text, None, "not ours")
    equal = Cell(row, column, text, ours, "equal")
    for remark in remarks:
        if remark["status"] == "open":
            return Cell(row, column, text, ours, "open", remark["note"])
        if equal.difference and remark["column"] in (column, "*"):
            return Cell(row, column, text, ours, "slip", remark["note"])
    return Cell(row, column, text, ours, "differs") if equal.difference else equal
