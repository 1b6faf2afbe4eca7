"""`ecoformer cost`: what a model costs, layer by layer, for several mechanisms, or along a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from ecoformer.accounting import Ledger
from ecoformer.accounting import cost as cost_of
from ecoformer.accounting.layers import PARTS
from ecoformer.accounting.ledger import short
from ecoformer.bitfusion import ModelResult, simulate_model
from ecoformer.bitfusion.model import NOT_SIMULATED
from ecoformer.cli import common
from ecoformer.cli.common import NATIVE

ENERGY = "fp32-45nm"


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
    on: Annotated[
        Literal["bitfusion"] | None,
        typer.Option(help="Cycles and energy on BitFusion, the accelerator that the paper simulates."),
    ] = None,
    energy: common.Energy = ENERGY,
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    as_json: common.AsJson = False,
) -> None:
    """Operations and energy of one forward pass.

    Examples: `ecoformer cost pvt_v2_b0 --attention eco --accounting paper --resolution 224`;
    `ecoformer cost pvt_v2_b0 --compare softmax,eco --sweep resolution=224,384,512`;
    `ecoformer cost pvt_v2_b0 --compare softmax,eco --on bitfusion`
    """
    common.exclude(("--attention", attention), ("--compare", compare))
    key, values = common.parse_sweep(sweep) if sweep is not None else ("", [])
    common.exclude(
        ("--resolution", resolution), ("--tokens", tokens), (f"--sweep {key}", key in common.INPUTS)
    )
    others = {"--sweep": sweep, "--accounting exact": accounting == "exact", "--energy": energy != ENERGY}
    for option, given in others.items():
        common.exclude(("--on", on), (option, given))
    names = [attention or NATIVE] if compare is None else common.names_in(compare, "--compare")
    if compare is not None and sweep is None:
        names = list(dict.fromkeys((NATIVE, *names)))
    chosen = common.parse_settings(settings or [])
    common.check_settings(names, chosen)
    for name in names if key and key not in common.INPUTS else ():
        common.check_settings([name], [key])
    size: dict[str, Any] = {"resolution": resolution, "tokens": tokens}
    how: dict[str, Any] = {"accounting": accounting, "energy": energy}

    def counted(mechanism: str, **changed: Any) -> Any:
        at = changed if key in common.INPUTS else size
        with common.progress(as_json) as progress:
            progress(
                " ".join(["counting", mechanism, *(f"{name}={value}" for name, value in changed.items())])
            )
            built = common.counted_model(model, mechanism, chosen | changed, **at)
            return cost_of(*built, **how) if on is None else simulate_model(*built)

    if sweep is not None:
        rows = [
            ({"attention": name, key: value}, counted(name, **{key: value}))
            for name in names
            for value in values
        ]
        if as_json:
            common.print_json([about | ledger.summary() for about, ledger in rows])
        else:
            _print(rows)
        return
    found = {name: counted(name) for name in names}
    if as_json:
        facts = {name: each.to_dict() for name, each in found.items()}
        common.print_json(facts if compare is not None else facts[names[0]])
    elif on is not None:
        _print_cycles(found)
    elif compare is not None:
        _print([({"attention": name}, ledger) for name, ledger in found.items()])
    else:
        common.say(found[names[0]])


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
    _print_uncounted({about["attention"]: ledger for about, ledger in rows})


def _print_cycles(found: dict[str, ModelResult]) -> None:
    """Print models on BitFusion: cycles, time, energy, and where the energy goes."""
    rows = []
    for name, result in found.items():
        total = result.total
        numbers = {
            "cycles": f"{total.cycles:,}",
            "stalls": f"{total.stall_cycles / total.cycles:.0%}",
            "ms": f"{total.latency_s * 1e3:.4g}",
            "mJ": f"{total.energy_nj / 1e6:.4g}",
            "in DRAM": f"{total.energy.dram / total.energy_nj:.0%}",
        }
        rows.append({"attention": name} | numbers)
    common.print_table(["attention"], rows, list(rows[0])[1:])
    for name, result in found.items():
        energy = result.total.energy_nj
        parts = (f"{part} {result.of(part).energy_nj / energy:.0%}" for part in PARTS)
        common.say(f"energy of {name}: {', '.join(parts)}")
    _print_uncounted(found)
    common.say(f"not simulated: {NOT_SIMULATED}")


def _print_uncounted(found: Mapping[str, Ledger | ModelResult]) -> None:
    for name, result in found.items():
        if result.uncounted:
            common.say(f"not counted ({name}): {', '.join(result.uncounted)}")
