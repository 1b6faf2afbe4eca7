"""`ecoformer cost`: what a model costs, layer by layer, for several mechanisms, or along a sweep."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ecoformer.accounting import Ledger
from ecoformer.accounting import cost as cost_of
from ecoformer.accounting.ledger import short
from ecoformer.cli import common
from ecoformer.cli.common import NATIVE


def cost(
    model: common.Model,
    attention: Annotated[
        str | None, typer.Option(help="Convert the model first; default: count it as it is.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Mechanisms side by side: `softmax,performer,eco`; the model as it is comes first."
        ),
    ] = None,
    settings: common.Settings = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="`resolution=224,384`, `tokens=1024,4096`, or any argument: `bits=8,16`, `support=10,25`.",
        ),
    ] = None,
    accounting: common.Accounting = "paper",
    backend: Annotated[
        Literal["eager", "cpu"] | None,
        typer.Option(help="With `--accounting exact`: `eager` counts plain PyTorch, `cpu` the CPU kernels."),
    ] = None,
    energy: common.Energy = "fp32-45nm",
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    as_json: common.AsJson = False,
) -> None:
    """Operations and energy of one forward pass.

    Examples: `ecoformer cost pvt_v2_b0 --attention eco --accounting paper --resolution 224`;
    `ecoformer cost pvt_v2_b0 --compare softmax,eco --sweep resolution=224,384,512`;
    `ecoformer cost pvt_v2_b0 --attention eco --accounting exact --backend cpu`
    """
    common.exclude(("--attention", attention), ("--compare", compare))
    key, values = common.parse_sweep(sweep) if sweep is not None else ("", [])
    common.exclude(
        ("--resolution", resolution), ("--tokens", tokens), (f"--sweep {key}", key in common.INPUTS)
    )
    names = [attention or NATIVE] if compare is None else common.names_in(compare, "--compare")
    if compare is not None and sweep is None:
        names = list(dict.fromkeys((NATIVE, *names)))
    chosen = common.parse_settings(settings or [])
    common.check_settings(names, chosen)
    for name in names if key and key not in common.INPUTS else ():
        common.check_settings([name], [key])
    size: dict[str, Any] = {"resolution": resolution, "tokens": tokens}
    how: dict[str, Any] = {"accounting": accounting, "energy": energy, "backend": backend}

    def ledger_of(mechanism: str, **changed: Any) -> Ledger:
        at = changed if key in common.INPUTS else size
        with common.progress(as_json) as progress:
            progress(
                " ".join(["counting", mechanism, *(f"{name}={value}" for name, value in changed.items())])
            )
            return cost_of(*common.counted_model(model, mechanism, chosen | changed, **at), **how)

    if sweep is not None:
        rows = [
            ({"attention": name, key: value}, ledger_of(name, **{key: value}))
            for name in names
            for value in values
        ]
        if as_json:
            common.print_json([about | ledger.summary() for about, ledger in rows])
        else:
            _print(rows)
    elif compare is not None:
        ledgers = {name: ledger_of(name) for name in names}
        if as_json:
            common.print_json({name: ledger.to_dict() for name, ledger in ledgers.items()})
        else:
            _print([({"attention": name}, ledger) for name, ledger in ledgers.items()])
    else:
        ledger = ledger_of(names[0])
        if as_json:
            typer.echo(ledger.to_json())
        else:
            common.say(ledger)


def _print(rows: list[tuple[dict[str, Any], Ledger]]) -> None:
    """Print several ledgers, each with what distinguishes it: the mechanism, and the value of a sweep."""
    cells = []
    for about, ledger in rows:
        total = ledger.total
        amounts = {"mul (M)": total.mul / 1e6, "add (M)": total.add / 1e6}
        if total.bytes:
            amounts["MB"] = total.bytes / 1e6
        amounts["mJ"] = ledger.energy_pj / 1e9
        share = {"in attention": f"{ledger.shares()['attention']:.0%}"}
        cells.append(about | {name: short(x) for name, x in amounts.items()} | share)
    names = list(rows[0][0])
    common.print_table(names, cells, [name for name in cells[0] if name not in names])
    for name, ledger in {about["attention"]: ledger for about, ledger in rows}.items():
        for what, layers in ledger.notes():
            common.say(f"{what} ({name}): {', '.join(layers)}")
