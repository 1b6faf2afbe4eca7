"""`ecoformer figure`: figures of what models cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ecoformer.accounting import cost
from ecoformer.accounting.sweeps import sweep as swept_costs
from ecoformer.bitfusion import attention_layer, printed_table, printed_work, simulate_all, simulate_model
from ecoformer.cli.settings import counted_model, names_in, swept
from ecoformer.report.figures import accuracy_figure, bitfusion_figure, shares_figure, sweep_figure
from ecoformer.report.rows import accuracy_rows, file_rows, printed_rows
from ecoformer.report.style import check_target, readable, save

figure = typer.Typer(help="Figures of what models cost, as PNG, SVG or PDF.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="The file: .png, .svg or .pdf.", callback=check_target)]
Accounting = Annotated[
    str, typer.Option(help="`paper` counts what the paper counts, `exact` all that is executed.")
]
Energy = Annotated[str, typer.Option(help="An energy table's name, or a JSON file.")]
Quantity = Annotated[str, typer.Option(help="`energy`, `mul` or `add`.")]
Resolution = Annotated[int, typer.Option(help="Height and width of the image.", min=1)]


@figure.command()
def shares(
    out: Out,
    models: Annotated[str, typer.Option(help="timm's names, between commas.")] = ",".join(
        f"pvt_v2_b{i}" for i in range(5)
    ),
    compare: Annotated[str, typer.Option(help="Mechanisms, one panel each.")] = "softmax,eco",
    accounting: Accounting = "paper",
    energy: Energy = "fp32-45nm",
    quantity: Quantity = "energy",
    resolution: Resolution = 224,
) -> None:
    """Shares of attention and FFN over models: the paper's Figure 2, and the same with other attention.

    Example: `ecoformer figure shares --out shares.png`
    """
    rows = []
    key = _key(quantity)
    kind: Any = accounting  # `cost` checks it
    for mechanism in names_in(compare, "--compare"):
        for name in names_in(models, "--models"):
            model, example = counted_model(name, mechanism, batch=1, resolution=resolution)
            ledger = cost(model, example, accounting=kind, energy=energy)
            _check_complete(mechanism, ledger.uncounted, accounting)
            counts = {part: ledger.of(part) for part in ("attention", "ffn", "other")}
            parts = {
                part: ledger.energy.energy_pj(count) if key == "energy_pj" else getattr(count, key)
                for part, count in counts.items()
            }
            rows.append({"model": name, "mechanism": mechanism, **parts})
    _save(shares_figure(rows, key), out)


@figure.command()
def sweep(
    out: Out,
    model: Annotated[
        str, typer.Argument(help="A timm model's name, a checkpoint, or a folder.")
    ] = "pvt_v2_b0",
    values: Annotated[
        str, typer.Option("--sweep", help="`resolution=224,448,896`, or tokens=..., bits=..., support=...")
    ] = "resolution=224,448,896,1792",
    compare: Annotated[
        str, typer.Option(help="Mechanisms, one line each.")
    ] = "softmax,performer,linformer,reformer,eco",
    accounting: Accounting = "exact",
    energy: Energy = "fp32-45nm",
    quantity: Quantity = "energy",
) -> None:
    """Energy or operations against resolution, tokens or a setting, one line for each mechanism.

    Example: `ecoformer figure sweep pvt_v2_b0 --sweep resolution=224,448,896 --out sweep.png`
    """
    parameter, equals, _ = (part.strip() for part in values.partition("="))
    if not parameter or not equals:
        raise ValueError(f"--sweep takes a name and values, such as resolution=224,448, got {values!r}")
    points = [about[parameter] for about, _ in swept(values, {parameter: 1})]
    kind: Any = accounting  # `cost` checks it
    found = swept_costs(
        lambda: counted_model(model, None, batch=1)[0],
        parameter,
        points,
        mechanisms=names_in(compare, "--compare"),
        accounting=kind,
        energy=energy,
    )
    rows = []
    for point in found:
        _check_complete(str(point.mechanism), point.ledger.uncounted, accounting)
        totals = point.ledger.total.to_dict() | {"energy_pj": point.ledger.energy_pj}
        rows.append({"mechanism": point.mechanism, "value": point.value, **totals})
    _save(sweep_figure(rows, found[0].parameter, _key(quantity)), out)


@figure.command()
def accuracy(
    out: Out,
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON or CSV files whose rows have a label, energy_pj and accuracy."),
    ] = None,
    printed: Annotated[
        str | None, typer.Option(help="A table of the paper, such as cifar100_attentions.")
    ] = None,
) -> None:
    """Accuracy against energy, from result files or from a table of the paper.

    Example: `ecoformer figure accuracy --printed cifar100_attentions --out accuracy.png`
    """
    rows = []
    for path in results or ():
        rows += accuracy_rows(file_rows(path), str(path))
    if printed is not None:
        rows += accuracy_rows(printed_rows(printed), f"the paper's {printed}")
    if not rows:
        raise ValueError("there is nothing to draw: name result files, or --printed cifar100_attentions")
    _save(accuracy_figure(rows), out)


@figure.command()
def bitfusion(
    out: Out,
    what: Annotated[
        str, typer.Argument(help="`table` (the paper's), `layer` (one attention layer), or a model's name.")
    ] = "table",
    compare: Annotated[str, typer.Option(help="Mechanisms of a layer or a model.")] = "softmax,eco",
    resolution: Resolution = 224,
    batch: Annotated[
        int | None, typer.Option(help="Samples; default: 16 for a layer, 1 for a model.", min=1)
    ] = None,
) -> None:
    """Where time and energy go on BitFusion, as stacked bars.

    Example: `ecoformer figure bitfusion pvt_v2_b0 --compare softmax,eco --out model.png`
    """
    names = names_in(compare, "--compare")
    if what == "table":
        ours = {row["method"]: " (ours)" if row["reading"] == "ours" else "" for row in printed_table()}
        bars = {readable(name) + note: simulate_all(printed_work(name)) for name, note in ours.items()}
    elif what == "layer":
        bars = {readable(name): simulate_all(attention_layer(name, batch=batch or 16)) for name in names}
    else:
        bars = {
            readable(name): simulate_model(
                *counted_model(what, name, batch=batch or 1, resolution=resolution)
            ).total
            for name in names
        }
    _save(bitfusion_figure(bars, divide_by=16 if what == "table" else 1), out)


def _key(quantity: str) -> str:
    if quantity not in ("energy", "mul", "add"):
        raise ValueError(f"--quantity must be energy, mul or add, got {quantity!r}")
    return "energy_pj" if quantity == "energy" else quantity


def _check_complete(mechanism: str, uncounted: tuple[str, ...], accounting: str) -> None:
    """A figure cannot show what it leaves out."""
    if uncounted:
        raise ValueError(
            f"{mechanism}: the {accounting} accounting does not count {uncounted[0]} "
            f"({len(uncounted)} layers in all): try --accounting exact"
        )


def _save(drawn: Any, out: Path) -> None:
    typer.echo(f"wrote {save(drawn, out)}")
