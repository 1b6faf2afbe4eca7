"""`ecoformer figure`: figures of what models cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ecoformer.accounting import Ledger, cost
from ecoformer.cli import common
from ecoformer.report import figures
from ecoformer.report.figures import check_target, save

figure = typer.Typer(help="Figures of what models cost, as PNG, SVG or PDF.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="The file: .png, .svg or .pdf.", callback=check_target)]


@figure.command()
def shares(
    out: Out,
    models: Annotated[
        str,
        typer.Option(
            help="Models between commas, as in `ecoformer cost`. Default: pvt_v2_b0 to b4.",
            show_default=False,
        ),
    ] = ",".join(f"pvt_v2_b{i}" for i in range(5)),
    compare: common.Compare = "softmax,eco",
    accounting: common.Accounting = "paper",
    energy: common.Energy = "fp32-45nm",
    resolution: common.Resolution = None,
) -> None:
    """Shares of attention and FFN in the energy of models: the paper's Figure 2, one panel a mechanism.

    Example: `ecoformer figure shares --out shares.png`
    """
    rows = []
    for mechanism in common.names_in(compare, "--compare"):
        for name in common.names_in(models, "--models"):
            counted = common.counted_model(name, mechanism, resolution=resolution)
            ledger = cost(*counted, accounting=accounting, energy=energy)
            _check_complete(mechanism, ledger)
            parts = {part: share * ledger.energy_pj for part, share in ledger.shares().items()}
            rows.append({"model": name, "mechanism": mechanism, **parts})
    _save(figures.shares_figure(rows), out)


@figure.command()
def accuracy(
    out: Out,
    results: Annotated[
        list[Path],
        typer.Argument(help="Files of benchmarks/compare.py, or JSON lists of label, energy_pj, accuracy."),
    ],
) -> None:
    """Accuracy against energy, from result files.

    Example: `ecoformer figure accuracy results/cifar100.json --out accuracy.png`
    """
    rows = [row for path in results for row in figures.accuracy_rows(path)]
    _save(figures.accuracy_figure(rows), out)


def _check_complete(mechanism: str, ledger: Ledger) -> None:
    """A figure cannot show what it leaves out."""
    if ledger.uncounted:
        raise ValueError(
            f"{mechanism}: the {ledger.accounting} accounting does not count {ledger.uncounted[0]} "
            f"({len(ledger.uncounted)} layers in all): try --accounting exact"
        )


def _save(drawn: Any, out: Path) -> None:
    typer.echo(f"wrote {save(drawn, out)}")
