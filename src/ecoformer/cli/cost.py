"""`ecoformer cost`: what a model costs, layer by layer, with several mechanisms, or along a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from ecoformer.accounting import Ledger, Point, sweep
from ecoformer.accounting import cost as cost_of
from ecoformer.accounting.ledger import csv_text
from ecoformer.accounting.sweeps import INPUTS, NATIVE
from ecoformer.cli.console import plain_console
from ecoformer.cli.settings import (
    counted_model,
    example_input,
    exclude,
    mechanisms_in,
    parse_settings,
    parse_sweep,
    settings_for,
)

_DIVISORS = {"10⁹": 1e9, "10⁶": 1e6}


def cost(
    model: Annotated[str, typer.Argument(help="A timm model's name, a checkpoint, or a folder.")],
    attention: Annotated[
        str | None, typer.Option(help="Convert the model first. Default: count it as it is.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Several mechanisms side by side: `softmax,performer,eco`; `native` is the model as it is."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An argument of the mechanism; may be repeated."),
    ] = None,
    along: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUES",
            help="`resolution=224,384`, `tokens=1024,4096`, or any argument: `bits=8,16`, `support=10,25`.",
        ),
    ] = None,
    accounting: Annotated[
        str, typer.Option(help="`paper` counts what the paper counts, `exact` everything that is executed.")
    ] = "paper",
    backend: Annotated[
        str | None,
        typer.Option(help="Exact only: `eager` for single steps of PyTorch, `cpu` for the CPU kernels."),
    ] = None,
    energy: Annotated[str, typer.Option(help="An energy table's name, or a JSON file.")] = "fp32-45nm",
    resolution: Annotated[
        int | None, typer.Option(help="Height and width of the image. Default: 224.", min=1)
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the text, for text models.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Operations and energy of one forward pass.

    Examples: `ecoformer cost pvt_v2_b0 --attention eco --accounting paper --resolution 224`;
    `ecoformer cost pvt_v2_b0 --compare softmax,eco --sweep resolution=224,384,512`;
    `ecoformer cost pvt_v2_b0 --attention eco --accounting exact --backend cpu`
    """
    names = mechanisms_in(attention, compare)
    exclude(("--json", as_json), ("--csv", as_csv))
    swept = None if along is None else parse_sweep(along)
    over_inputs = along if swept is not None and swept[0] in INPUTS else None
    exclude(("--resolution", resolution), ("--tokens", tokens), (f"--sweep {over_inputs}", over_inputs))
    chosen = settings_for(names, parse_settings(settings or []))
    size = {"tokens": tokens} if tokens is not None else {"resolution": resolution or 224}
    how: dict[str, Any] = {"accounting": accounting, "energy": energy, "backend": backend}

    def ledger_of(mechanism: str | None, some: dict[str, Any]) -> Ledger:
        return cost_of(*counted_model(model, mechanism, **size, **some), **how)

    if swept is not None:
        points = _points(model, names, chosen, swept, size, how)
        _print([(point.about, point.ledger) for point in points], as_json, as_csv)
    elif compare is not None:
        ledgers = {name or NATIVE: ledger_of(name, some) for name, some in zip(names, chosen, strict=True)}
        _print([({"attention": name}, ledger) for name, ledger in ledgers.items()], as_json, as_csv)
        if "softmax" in ledgers and NATIVE not in ledgers and not (as_json or as_csv):
            _note_cheaper_model(ledgers, ledger_of(None, {}))
    else:
        ledger = ledger_of(attention, chosen[0])
        text = ledger.to_json() if as_json else ledger.to_csv() if as_csv else str(ledger)
        typer.echo(text, nl=not as_csv)


def _points(
    model: str,
    names: list[str | None],
    settings: list[dict[str, Any]],
    swept: tuple[str, list[Any]],
    size: dict[str, int],
    how: dict[str, Any],
) -> list[Point]:
    """One point for each mechanism and value; models are built for the resolution of their point."""
    parameter, values = swept
    found: list[Point] = []
    for name, some in zip(names, settings, strict=True):
        for value in values:
            build = partial(_build, model, {parameter: value} if parameter in INPUTS else size)
            given: dict[str, Any] = {"mechanisms": [name], "settings": some, "example": example_input(**size)}
            found += sweep(build, parameter, [value], **given, **how)
    return found


def _build(model: str, size: dict[str, int]) -> nn.Module:
    return counted_model(model, None, **size)[0]


def _note_cheaper_model(ledgers: dict[str, Ledger], native: Ledger) -> None:
    """Softmax over all tokens may replace cheaper attention, such as attention to fewer keys."""
    if native.energy_pj < 0.99 * ledgers["softmax"].energy_pj:
        unit = _unit(ledgers.values())
        energy = f"{native.energy_pj / _DIVISORS[unit]:,.2f} ({unit} pJ)"
        typer.echo(f"softmax attends to all tokens; the model as it is takes {energy}, see --compare native")


def _print(rows: list[tuple[dict[str, Any], Ledger]], as_json: bool, as_csv: bool) -> None:
    """Several ledgers, each with what distinguishes it: the mechanism, and the value of a sweep."""
    summaries = [about | ledger.summary() for about, ledger in rows]
    if as_json:
        compared = {about["attention"]: ledger.to_dict() for about, ledger in rows if len(about) == 1}
        typer.echo(json.dumps(compared or summaries, indent=2))
        return
    if as_csv:
        typer.echo(csv_text(summaries[0], summaries), nl=False)
        return
    unit = _unit(ledger for _, ledger in rows)
    keys = ["attention", *(key for key in rows[0][0] if key != "attention")]
    table = Table(*keys)
    for head in (f"mul ({unit})", f"add ({unit})", f"energy ({unit} pJ)", "share of attention"):
        table.add_column(head, justify="right")
    for i, (about, ledger) in enumerate(rows):
        numbers = (ledger.total.mul, ledger.total.add, ledger.energy_pj)
        figures = [f"{x / _DIVISORS[unit]:,.2f}" for x in numbers]
        ends = about["attention"] != rows[min(i + 1, len(rows) - 1)][0]["attention"] and len(keys) > 1
        share = f"{ledger.shares()['attention']:.0%}"
        table.add_row(*(str(about[key]) for key in keys), *figures, share, end_section=ends)
    plain_console().print(table)
    for name, ledger in {about["attention"]: ledger for about, ledger in rows}.items():
        for what, layers in ledger.notes():
            typer.echo(f"{what} ({name}): {', '.join(layers)}")


def _unit(ledgers: Iterable[Ledger]) -> str:
    """The unit in which the smallest ledger has digits to show."""
    return "10⁹" if min(ledger.total.mul for ledger in ledgers) >= 1e7 else "10⁶"
