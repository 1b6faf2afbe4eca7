"""`ecoformer demo`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from ecoformer.cli.common import AsJson, print_json, print_table


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the runs and the comparison.")] = Path("runs/demo"),
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a value of the recipe.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with native, softmax and hashed attention, equally long, and compare them.

    Generated pictures of 1,024 tokens; a few minutes on two cores. Finished runs are not repeated.

    Example: `ecoformer demo --out runs/demo`
    """
    from ecoformer.report.demo import run_demo

    found = run_demo(out, changes=tuple(change or ()), show=not as_json)
    if as_json:
        print_json(found)
        return
    rows = [
        {
            "model": row["model"],
            "accuracy": f"{row['accuracy']:.2%}",
            "energy (paper)": f"{row['paper_mj']:.3g} mJ",
            "energy (exact)": f"{row['exact_mj']:.3g} mJ",
            "time": f"{row['ms']:.1f} ms",
        }
        for row in found["rows"]
    ]
    print_table(["model"], rows, list(rows[0])[1:])
    for text in (*found["verdicts"], *found["notes"]):
        typer.echo(textwrap.fill(text, 79))
