"""`ecoformer cost`: what a model costs, layer by layer, or mechanisms side by side, or along a sweep."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from ecoformer.accounting import Ledger, Point, sweep
from ecoformer.accounting import cost as cost_of
from ecoformer.accounting.sweeps import INPUTS, NATIVE
from ecoformer.cli.console import plain_console
from ecoformer.cli.settings import mechanisms_in, parse_settings, parse_sweep, settings_for
from ecoformer.cli.sources import open_model
from ecoformer.conversion import convert

_DIVISORS = {"10⁹": 1e9, "10⁶": 1e6}


def cost(
    model: Annotated[str, typer.Argument(help="A timm model's name, a checkpoint, or a folder.")],
    attention: Annotated[
        str | None, typer.Option(help="Convert it first; without, the model is taken as it is.")
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
        str, typer.Option(help="`paper` counts what the paper counts, `exact` all that is executed.")
    ] = "paper",
    backend: Annotated[
        str | None,
        typer.Option(help="Exact only: `eager` single steps of PyTorch, `cpu` the kernels by tables."),
    ] = None,
    energy: Annotated[str, typer.Option(help="An energy table's name, or a JSON file.")] = "fp32-45nm",
    resolution: Annotated[
        int | None, typer.Option(help="Height and width of the image; 224 if nothing is said.", min=1)
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
    _exclude(("--attention", attention), ("--compare", compare))
    _exclude(("--json", as_json), ("--csv", as_csv))
    swept = None if along is None else parse_sweep(along)
    over_inputs = along if swept is not None and swept[0] in INPUTS else None
    _exclude(("--resolution", resolution), ("--tokens", tokens), (f"--sweep {over_inputs}", over_inputs))
    names = mechanisms_in(attention, compare)
    chosen = settings_for(names, parse_settings(settings or []))
    example: Any = torch.zeros(1, 3, resolution or 224, resolution or 224)
    if tokens is not None:
        example = torch.zeros(1, tokens, dtype=torch.long)
    size = None if tokens is not None else resolution or 224
    ask = _Question(partial(_open, model), size, example, accounting, energy, backend)
    if swept is not None:
        _print_points(ask.sweep(names, chosen, *swept), as_json, as_csv)
    elif compare is not None:
        ledgers = {name or NATIVE: ask.ledger(name, some) for name, some in zip(names, chosen, strict=True)}
        _print_ledgers(ledgers, as_json, as_csv)
        if not (as_json or as_csv):
            _say_what_was_replaced(ledgers, lambda: ask.ledger(None, {}))
    else:
        ledger = ask.ledger(attention, chosen[0])
        text = ledger.to_json() if as_json else ledger.to_csv() if as_csv else str(ledger)
        typer.echo(text, nl=not as_csv)


@dataclass(frozen=True)
class _Question:
    """A model, its input, and how to count."""

    build: Callable[[int | None], nn.Module]
    """For images of a size, or None."""
    size: int | None
    example: Any
    accounting: Any
    energy: str
    backend: Any

    def ledger(self, mechanism: str | None, settings: dict[str, Any]) -> Ledger:
        model = self.build(self.size)
        if mechanism is not None:
            convert(model, mechanism, example=self.example, **settings)
        return cost_of(model, self.example, **self._how())

    def sweep(
        self, names: list[str | None], settings: list[dict[str, Any]], parameter: str, values: list[Any]
    ) -> list[Point]:
        count = {"example": self.example} | self._how()
        found: list[Point] = []
        for name, some in zip(names, settings, strict=True):
            for value in values:
                size = value if parameter == "resolution" else None if parameter == "tokens" else self.size
                build = partial(self.build, size)
                found += sweep(build, parameter, [value], mechanisms=[name], settings=some, **count)
        return found

    def _how(self) -> dict[str, Any]:
        return {"accounting": self.accounting, "energy": self.energy, "backend": self.backend}


def _open(model: str, size: int | None) -> nn.Module:
    # A name has no weights worth having; files and folders have.
    with nullcontext() if Path(model).exists() else torch.device("meta"):
        return open_model(model, image_size=size).model


def _exclude(*options: tuple[str, Any]) -> None:
    given = [name for name, value in options if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other")


def _print_ledgers(ledgers: dict[str, Ledger], as_json: bool, as_csv: bool) -> None:
    if as_json:
        typer.echo(json.dumps({name: ledger.to_dict() for name, ledger in ledgers.items()}, indent=2))
    elif as_csv:
        _csv([{"attention": name} | ledger.summary() for name, ledger in ledgers.items()])
    else:
        unit = _unit(ledgers.values())
        table = _table(unit, "attention")
        for name, ledger in ledgers.items():
            table.add_row(name, *_figures(ledger, unit))
        plain_console().print(table)
        _print_notes(ledgers)


def _say_what_was_replaced(ledgers: dict[str, Ledger], native: Callable[[], Ledger]) -> None:
    """A model may have had cheaper attention than softmax over all tokens, such as fewer keys."""
    if NATIVE in ledgers or "softmax" not in ledgers:
        return
    own = native().energy_pj
    if own < 0.99 * ledgers["softmax"].energy_pj:
        unit = _unit(ledgers.values())
        says = f"as it is, the model takes {own / _DIVISORS[unit]:,.2f} ({unit} pJ); native shows it"
        typer.echo(f"softmax is that over all tokens: {says}")


def _print_points(points: list[Point], as_json: bool, as_csv: bool) -> None:
    rows = [point.to_dict() for point in points]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif as_csv:
        _csv(rows)
    else:
        unit = _unit(point.ledger for point in points)
        table = _table(unit, "attention", points[0].parameter)
        for before, point in zip([None, *points], points, strict=False):
            if before is not None and before.mechanism != point.mechanism:
                table.add_section()
            table.add_row(point.mechanism or NATIVE, str(point.value), *_figures(point.ledger, unit))
        plain_console().print(table)
        _print_notes({point.mechanism or NATIVE: point.ledger for point in points})


def _print_notes(ledgers: dict[str, Ledger]) -> None:
    for name, ledger in ledgers.items():
        for what, layers in ledger.notes():
            typer.echo(f"{what} ({name}): {', '.join(layers)}")


def _unit(ledgers: Iterable[Ledger]) -> str:
    """In which the smallest of all has digits to show."""
    return "10⁹" if min(ledger.total.mul for ledger in ledgers) >= 1e7 else "10⁶"


def _table(unit: str, *keys: str) -> Table:
    table = Table(*keys)
    for head in (f"mul ({unit})", f"add ({unit})", f"energy ({unit} pJ)", "of it attention"):
        table.add_column(head, justify="right")
    return table


def _figures(ledger: Ledger, unit: str) -> list[str]:
    counts = [f"{x / _DIVISORS[unit]:,.2f}" for x in (ledger.total.mul, ledger.total.add, ledger.energy_pj)]
    return [*counts, f"{ledger.shares()['attention']:.0%}"]


def _csv(rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    typer.echo(text.getvalue(), nl=False)
