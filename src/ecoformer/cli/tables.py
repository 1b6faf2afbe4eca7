"""`ecoformer tables`: the paper's tables, printed figures beside ours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from ecoformer.cli.common import AsJson, plain_console, print_json, print_table, progress, say
from ecoformer.report.figures import PARTS, check_target, save_shares
from ecoformer.report.ours import figure2
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
    name: Annotated[str | None, typer.Argument(help="One table, or `figure2`; without, all tables.")] = None,
    out: Annotated[Path | None, typer.Option(help="Draw figure2 into this file: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every table of the paper: the printed figure, ours, and the difference.

    Example: `ecoformer tables imagenet_main`

    Figure 2, the shares of attention and FFN in energy: `ecoformer tables figure2 --out shares.png`
    """
    if out is not None:
        if name != "figure2":
            raise ValueError(
                f"--out draws figure2, got {name or 'no name'}: ecoformer tables figure2 --out {out}"
            )
        check_target(out)
    if name == "figure2":
        _figure2(out, as_json)
        return
    found = []
    with progress(as_json) as show:
        for each in [name] if name is not None else list_tables():
            show(f"counting {each}")
            found.append(paper_table(each))
    if as_json:
        print_json([table.to_dict() for table in found])
    else:
        _show(found)


def _figure2(out: Path | None, as_json: bool) -> None:
    """Print the shares, or draw them."""
    with progress(as_json) as show:
        show("counting")
        rows = figure2()
    if out is not None:
        save_shares(rows, out)
        typer.echo(f"wrote {out}")
    elif as_json:
        print_json(rows)
    else:
        totals = [sum(row[part] for part in PARTS) for row in rows]
        cells = [
            {"model": row["model"], "mechanism": row["mechanism"], "mJ": f"{total * 1e-9:.3g}"}
            | {part: f"{row[part] / total:.1%}" for part in PARTS}
            for row, total in zip(rows, totals, strict=True)
        ]
        print_table(["model", "mechanism"], cells, ["mJ", *PARTS])


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
