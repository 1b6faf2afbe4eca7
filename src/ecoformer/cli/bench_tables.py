"""Benchmarks as tables of at most 100 columns."""

from __future__ import annotations

import json
from itertools import groupby

import typer
from rich.table import Table

from ecoformer.benchmarking import Row, Run
from ecoformer.cli.console import plain_console


def show(run: Run, as_json: bool) -> None:
    """Print a run; the exit status is 1 if a result was wrong."""
    if as_json:
        typer.echo(json.dumps(run.to_dict(), indent=2))
    else:
        console = plain_console()
        console.print(f"{run.device}, CPU threads: {run.threads}", soft_wrap=True)
        for title, rows in groupby(run.rows, key=_title):
            console.print(_table(title, list(rows)), width=100)
        for note in run.notes:
            console.print(note, soft_wrap=True)
    if run.wrong:
        raise typer.Exit(1)


def _title(row: Row) -> str:
    words = []
    for key, value in row.setting.items():
        if isinstance(value, bool):
            words += [key] if value else []
        elif isinstance(value, list):
            words.append("(" + ", ".join(map(str, value)) + ")")
        elif key in ("dtype", "model"):
            words.append(value)
        elif key != "counted" and not isinstance(value, float):
            words.append(f"{key} {value}")
    return ", ".join(words)


def _table(title: str, rows: list[Row]) -> Table:
    """Columns that no row fills are left out; failures are listed below."""
    table = Table("mechanism", "backend", title=title, title_justify="left")
    cells = [_cells(row) for row in rows]
    names = [name for name in cells[0] if any(row[name] for row in cells)]
    for name in names:
        table.add_column(name, justify="right")
    for row, cell in zip(rows, cells, strict=True):
        table.add_row(row.mechanism, row.backend, *(cell[name] for name in names))
    table.caption = "\n".join(f"{row.label}: {row.failure}" for row in rows if row.failure) or None
    table.caption_justify = "left"
    return table


def _cells(row: Row) -> dict[str, str]:
    timing, check, checked = row.timing, row.checked, ""
    if check is not None and check.passed:
        checked = f"{check.error:.0e} ≤ {check.bound:.0e}" if check.bound else check.against
    return {
        "ms": _short(timing.median_ms if timing else None),
        "quartiles": f"{_short(timing.low_ms)} – {_short(timing.high_ms)}" if timing else "",
        f"{row.setting.get('counted', 'calls')}/s": _short(row.per_second),
        "speed, SDPA = 1": _short(row.ratio_to_sdpa),
        "MB": _short(row.peak_mb),
        "J": _short(row.energy["per_item_joules"] if row.energy else None),
        "checked": checked,
    }


def _short(value: float | None) -> str:
    """Three digits, and all of those before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
