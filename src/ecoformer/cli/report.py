"""`ecoformer report` and `ecoformer demo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ecoformer.cli.common import AsJson, print_json, print_table


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Runs",
) -> None:
    """Write one HTML page that compares runs: a table, figures, and their recipes.

    Example: `ecoformer report runs/softmax runs/eco --out report.html`
    """
    from ecoformer.report.page import read_run, table_rows, write_page

    found = [read_run(path) for path in runs]
    best = max(found, key=lambda run: run.accuracy)
    lead = f"{len(found)} runs; {best.name} has the highest accuracy, {best.accuracy:.2%}."
    write_page(out, title, lead, found, table_rows(found))
    typer.echo(str(out))


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the page.")] = Path("runs/demo"),
    margin: Annotated[float, typer.Option(help="Accuracy that may be lost, 0 to 1.", min=0, max=1)] = 0.01,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a value of the recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small softmax model on digits, convert it to hashed attention, and compare the two.

    The exit status is 1 if hashed attention loses more accuracy than the margin.

    Example: `ecoformer demo --out runs/demo`
    """
    from ecoformer.report.demo import run_demo

    def progress(line: str) -> None:
        if not as_json:
            typer.echo(line)

    found = run_demo(out, margin=margin, changes=tuple(change or ()), progress=progress, show=not as_json)
    if as_json:
        print_json(asdict(found) | {"page": str(found.page), "kept": found.kept})
    else:
        print_table(list(found.rows[0]), found.rows, [])
        typer.echo(f"{found}\npage: {found.page}")
    raise typer.Exit(0 if found.kept else 1)
