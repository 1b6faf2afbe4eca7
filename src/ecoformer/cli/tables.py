"""`ecoformer tables`: the paper's tables, printed figures beside ours."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.padding import Padding

from ecoformer.cli.common import AsJson, plain_console, print_json, print_table, progress, say
from ecoformer.report.tables import STATUSES, Cell, PaperTable, list_tables, paper_table

_MARKS = {"equal": "=", "differs": "≠", "open": "~", "slip": "!", "not ours": ""}
_HEADS = {
    "mul_b": "mul\n10⁹",
    "add_b": "add\n10⁹",
    "energy_bpj": "energy\nmJ",
    "energy_pj": "energy\npJ",
    "throughput_img_s_rtx3090": "img/s\nRTX 3090",
}
"""Of columns; 10⁹ pJ, the paper's unit, are 1 mJ."""


def tables(
    name: Annotated[str | None, typer.Argument(help="One table; without, all of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every table of the paper: the printed figure, ours, and the difference.

    Example: `ecoformer tables imagenet_main`
    """
    found = []
    with progress(as_json) as show:
        for each in [name] if name is not None else list_tables():
            show(f"counting {each}")
            found.append(paper_table(each))
    if as_json:
        print_json([table.to_dict() for table in found])
    else:
        _show(found)


def _show(found: list[PaperTable]) -> None:
    for table in found:
        say(f"{table.title} ({table.name})\n")
        heads = {column: _HEADS.get(column, "\n".join(column.rsplit("_", 1))) for column in table.columns}
        rows = [{"": row} | {heads[c.column]: _text(c) for c in cells} for row, cells in table.rows()]
        print_table([""], rows, heads.values())
        say("")
        for remark in table.remarks():
            plain_console().print(Padding(remark, (0, 0, 0, 2), expand=False))
        say("")
    counts = Counter(cell.status for table in found for cell in table.cells)
    say("A cell is the printed figure, a mark, and ours where it is another.")
    rows = [{"": _MARKS[s], "cells": str(counts[s]), "status": s, "meaning": m} for s, m in STATUSES.items()]
    print_table(["", "cells", "status", "meaning"], rows, [])


def _text(cell: Cell) -> str:
    """Marks are aligned where no cell of a column has another figure."""
    if cell.ours is None:
        return cell.text
    ours = f" {cell.ours:.{cell.digits}f}" if cell.difference else ""
    return f"{cell.text} {_MARKS[cell.status]}{ours}"
