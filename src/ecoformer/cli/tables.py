"""`ecoformer tables`: the paper's tables, printed figures beside ours."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich import box
from rich.padding import Padding
from rich.table import Table

from ecoformer.cli.common import AsJson, plain_console, print_json
from ecoformer.report.tables import STATUSES, Cell, PaperTable, list_tables, paper_table

_MARKS = {"equal": "=", "differs": "≠", "open": "~", "slip": "!", "not ours": ""}


def tables(
    name: Annotated[str | None, typer.Argument(help="One table; without, all of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every table of the paper: the printed figure, ours, and the difference.

    Example: `ecoformer tables imagenet_main`
    """
    found = [paper_table(each) for each in ([name] if name is not None else list_tables())]
    if as_json:
        print_json([table.to_dict() for table in found])
    else:
        _show(found)


def _show(found: list[PaperTable]) -> None:
    console = plain_console()
    for table in found:
        console.print(f"{table.title} ({table.name})", style="bold")
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        shown.add_column("", no_wrap=True)
        for column in table.columns:
            shown.add_column(column, no_wrap=True)
        for row, cells in table.rows():
            shown.add_row(row, *map(_text, cells))
        console.print(shown)
        for remark in table.remarks():
            console.print(Padding(remark, (0, 0, 0, 2), expand=False))
        console.print()
    counts = Counter(cell.status for table in found for cell in table.cells)
    console.print("A cell is: printed, mark, ours, and the difference where there is one.")
    for status, meaning in STATUSES.items():
        console.print(f"  {_MARKS[status] or ' '} {counts[status]:>3} {status:<8} {meaning}")


def _text(cell: Cell) -> str:
    if cell.ours is None:
        return cell.text
    ours = f"{cell.text} {_MARKS[cell.status]} {cell.ours:.{cell.digits}f}"
    return f"{ours} {cell.difference:+.{cell.digits}f}" if cell.difference else ours
