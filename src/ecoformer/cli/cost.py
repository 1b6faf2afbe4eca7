"""`ecoformer cost`: what a model costs, layer by layer, or mechanisms side by side."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ecoformer.accounting import Ledger
from ecoformer.accounting import cost as cost_of
from ecoformer.cli.console import plain_console
from ecoformer.cli.sources import open_model
from ecoformer.conversion import convert


def cost(
    model: Annotated[str, typer.Argument(help="A timm model's name, a checkpoint, or a folder.")],
    attention: Annotated[
        str | None, typer.Option(help="Convert it first; without, the model is taken as it is.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Several mechanisms side by side: `softmax,performer,eco`.")
    ] = None,
    accounting: Annotated[
        str, typer.Option(help="`paper` counts what the paper counts, `exact` all that is executed.")
    ] = "paper",
    energy: Annotated[str, typer.Option(help="An energy table's name, or a JSON file.")] = "fp32-45nm",
    resolution: Annotated[int, typer.Option(help="Height and width of the image.", min=1)] = 224,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the text, for text models.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Operations and energy of one forward pass.

    Example: `ecoformer cost pvt_v2_b0 --attention eco --accounting paper --resolution 224`
    """
    if attention is not None and compare is not None:
        raise ValueError("--attention and --compare exclude each other")
    example: Any = torch.zeros(1, 3, resolution, resolution)
    if tokens is not None:
        example = torch.zeros(1, tokens, dtype=torch.long)
    ledger_of = partial(_ledger, model, example=example, accounting=accounting, energy=energy)
    if compare is None:
        ledger = ledger_of(attention)
        typer.echo(ledger.to_json() if as_json else str(ledger))
        return
    names = [name.strip() for name in compare.split(",") if name.strip()]
    ledgers = {name: ledger_of(name) for name in names}
    if as_json:
        typer.echo(json.dumps({name: ledger.to_dict() for name, ledger in ledgers.items()}, indent=2))
    else:
        _show(ledgers)


def _ledger(model: str, attention: str | None, *, example: Any, accounting: Any, energy: str) -> Ledger:
    # A name has no weights worth having; files and folders have.
    with nullcontext() if Path(model).exists() else torch.device("meta"):
        built = open_model(model).model
    if attention is not None:
        convert(built, attention, example=example)
    return cost_of(built, example, accounting=accounting, energy=energy)


def _show(ledgers: dict[str, Ledger]) -> None:
    table = Table("attention", "mul (10⁹)", "add (10⁹)", "energy (10⁹ pJ)", "of it attention", "not counted")
    for name, ledger in ledgers.items():
        total, share = ledger.total, ledger.shares()["attention"]
        numbers = (f"{total.mul / 1e9:.2f}", f"{total.add / 1e9:.2f}", f"{ledger.energy_pj / 1e9:.2f}")
        table.add_row(name, *numbers, f"{share:.0%}", f"{len(ledger.uncounted)} layers")
    plain_console().print(table)
