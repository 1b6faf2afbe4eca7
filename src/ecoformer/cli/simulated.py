"""What `ecoformer simulate` prints and draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from ecoformer.bitfusion import Total
from ecoformer.cli.console import plain_console
from ecoformer.report.rows import printed_rows
from ecoformer.report.style import check_target, readable, save


@dataclass(frozen=True)
class Run:
    """One simulation: what distinguishes it from the others, its total, and what else is known."""

    about: dict[str, Any]
    total: Total
    more: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return self.more or self.total.to_dict()

    @property
    def label(self) -> str:
        """A name in a table or figure."""
        counted = ("tokens", "rows", "inputs", "outputs")
        words = []
        for name, value in self.about.items():
            number = f"{value:,} {name}" if name in counted else f"{name} {value}"
            words.append(readable(value) if isinstance(value, str) else number)
        return ", ".join(words)


def target(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The file of a figure, checked before anything is computed."""
    try:
        return None if path is None else check_target(path)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{option.opts[0]}: {error}") from error


def draw(runs: Sequence[Run], figure: Path | None, divide_by: int = 1) -> None:
    """Draw the stacked bars, if `--figure` was given."""
    if figure is None:
        return
    from ecoformer.report.figures import bitfusion_figure

    bars = {run.label or "Operation": run.total for run in runs}
    save(bitfusion_figure(bars, divide_by=divide_by), figure)
    typer.echo(f"wrote {figure}", err=True)


def show(runs: Sequence[Run], as_json: bool, figure: Path | None, *, many: bool) -> None:
    """Print one result in full or several as a table; in JSON, mechanisms by name and sweeps as a list."""
    draw(runs, figure)
    if as_json:
        facts: Any = [run.about | run.facts for run in runs]
        if not many:
            facts = facts[0]
        elif list(runs[0].about) == ["attention"]:
            facts = {run.about["attention"]: run.facts for run in runs}
        typer.echo(json.dumps(facts, indent=2))
    elif many:
        _side_by_side(runs)
    else:
        _one(runs[0])


def _one(run: Run) -> None:
    total = run.total
    stalls = f"{total.stall_cycles:,} of them stalls"
    typer.echo(f"{total.cycles:,} cycles ({stalls}), {total.latency_s * 1e3:.4g} ms")
    typer.echo(f"{total.energy_nj:,.2f} nJ")
    for part, energy in total.energy._asdict().items():
        typer.echo(f"  {part:<18} {energy:>16,.2f}")
    for part, facts in run.facts.get("parts", {}).items():
        time, energy = facts["cycles"] / total.cycles, facts["energy_nj"] / total.energy_nj
        typer.echo(f"{part:<10} {time:>4.0%} of the time, {energy:>4.0%} of the energy")
    _left_out([run])


def _side_by_side(runs: Sequence[Run]) -> None:
    columns = list(runs[0].about)
    table = Table(*columns)
    for head in ("cycles", "stalls", "ms", "energy (mJ)", "in DRAM"):
        table.add_column(head, justify="right")
    for run in runs:
        total = run.total
        about = [value if isinstance(value, str) else f"{value:,}" for value in run.about.values()]
        stalls, dram = total.stall_cycles / total.cycles, total.energy.dram / total.energy_nj
        time = (f"{total.cycles:,}", f"{stalls:.0%}", f"{total.latency_s * 1e3:.4g}")
        table.add_row(*about, *time, f"{total.energy_nj / 1e6:.4g}", f"{dram:.0%}")
    plain_console().print(table)
    _left_out(runs)


def _left_out(runs: Sequence[Run]) -> None:
    """Print what a model's figures do not include."""
    if "not_simulated" not in runs[0].facts:
        return
    typer.echo(f"not simulated: {runs[0].facts['not_simulated']}")
    for label, layers in {run.label: run.facts["uncounted"] for run in runs}.items():
        if layers:
            typer.echo(f"not counted ({label}): {', '.join(layers)}")


def show_table(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print the paper's table, ours beside the printed figures."""
    printed = {row["method"]: row for row in printed_rows("bitfusion")}
    if as_json:
        joined = [
            row | {f"printed_{key}": float(printed[row["method"]][key]) for key in ("latency_ms", "energy")}
            for row in rows
        ]
        typer.echo(json.dumps(joined, indent=2))
        return
    table = Table("method")
    for head in ("ms", "printed", "energy (nJ)", "printed", "difference"):
        table.add_column(head, justify="right")
    table.add_column("decomposition")
    for row in rows:
        theirs = printed[row["method"]]
        difference = row["energy_nj"] / float(theirs["energy"]) - 1
        numbers = (f"{row['latency_ms']:.4f}", theirs["latency_ms"], f"{row['energy_nj']:,.2f}")
        how = "the paper's" if row["reading"] == "printed" else "ours"
        table.add_row(
            row["method"],
            *numbers,
            f"{float(theirs['energy']):,.2f}",
            f"{difference:+.1%}".replace("-0.0%", "+0.0%"),
            how,
        )
    plain_console().print(table)
    typer.echo("The printed unit is pJ; the figures are nJ, of 16 query rows. See docs/bitfusion.md.")
