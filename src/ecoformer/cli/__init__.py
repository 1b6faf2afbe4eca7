"""The command line: `ecoformer`, or `python -m ecoformer`. One file a command."""

from __future__ import annotations

import os
import sys

import typer

from ecoformer import __version__
from ecoformer.arguments import one_line
from ecoformer.cli.bench import bench
from ecoformer.cli.convert import convert
from ecoformer.cli.cost import cost
from ecoformer.cli.export import export
from ecoformer.cli.figure import figure
from ecoformer.cli.info import info
from ecoformer.cli.plan import plan
from ecoformer.cli.quantize import quantize
from ecoformer.cli.report import demo, report
from ecoformer.cli.tables import tables
from ecoformer.cli.train import evaluate, train
from ecoformer.third_party import missing, repair_torchvision

app = typer.Typer(
    name="ecoformer",
    help="Energy-saving attention with linear complexity for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(convert)
app.command()(cost)
app.command()(demo)
app.command("eval")(evaluate)
app.command()(export)
app.command()(info)
app.command()(plan)
app.command()(quantize)
app.command()(train)
app.command()(report)
app.command()(tables)
app.add_typer(bench, name="bench")
app.add_typer(figure, name="figure")


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    """Energy-saving attention with linear complexity for PyTorch."""
    if show:
        typer.echo(f"ecoformer {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. Errors are one line; ECOFORMER_DEBUG=1 shows the traceback.

    The exit status is 2 if the command cannot do what was asked, and 1 if it tried and failed.
    """
    try:
        repair_torchvision()
        app()
    except Exception as error:
        if os.environ.get("ECOFORMER_DEBUG"):
            raise
        if isinstance(error, ModuleNotFoundError):
            error = missing(error)
        typer.echo(f"ecoformer: {one_line(error, 2000)}", err=True)
        sys.exit(1 if isinstance(error, RuntimeError) else 2)
