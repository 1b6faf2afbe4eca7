"""`ecoformer report` and `ecoformer demo`."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from ecoformer.arguments import one_line
from ecoformer.cli.common import AsJson, print_json, print_table


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Runs",
    picture: Annotated[int, typer.Option(help="Test picture to show the models.", min=0)] = 0,
) -> None:
    """Write one HTML page that compares runs: a table, figures, and their recipes.

    If the runs share a data set of pictures in memory, the page shows what each model does with one.

    Example: `ecoformer report runs/softmax runs/eco --out report.html`
    """
    from ecoformer.report.inside import look_inside_runs
    from ecoformer.report.page import accuracy_note, read_run, table_rows, write_page

    found = [read_run(path) for path in runs]
    if len({run.name for run in found}) < len(found):
        found = [replace(run, name="/".join(path.parts[-2:])) for run, path in zip(found, runs, strict=True)]
    best = max(found, key=lambda run: run.accuracy)
    lead = f"{len(found)} runs; {best.name} has the highest accuracy, {best.accuracy:.2%}."
    try:
        sample = look_inside_runs(runs, [run.name for run in found], picture)
    except (OSError, ValueError, ImportError) as error:
        typer.echo(f"no picture on the page: {one_line(error, 300)}", err=True)
        sample = None
    write_page(out, title, lead, found, table_rows(found), notes=[accuracy_note(found)], sample=sample)
    typer.echo(str(out))


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the page.")] = Path("runs/demo"),
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a value of the recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with native, softmax and hashed attention, equally long, and compare them.

    Generated pictures of 1,024 tokens; a few minutes on two cores. Finished runs are not repeated.

    Example: `ecoformer demo --out runs/demo`
    """
    if not as_json:
        typer.echo("Generated pictures of 1,024 tokens; four kinds of attention, equally long.")
        typer.echo("The first run on a machine also compiles the CPU kernels.")
    from ecoformer.report.demo import run_demo

    def progress(line: str) -> None:
        if not as_json:
            typer.echo(line)

    found = run_demo(out, changes=tuple(change or ()), progress=progress, show=not as_json)
    if as_json:
        print_json(asdict(found) | {"page": str(found.page)})
        return
    print_table(["model"], found.rows, [name for name in found.rows[0] if name != "model"])
    for text in (*found.verdicts, *found.notes):
        typer.echo(textwrap.fill(text, 79))
    typer.echo(f"page: {found.page}")
