"""`ecoformer cost`: what a model costs, layer by layer, or for several mechanisms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from ecoformer.accounting import Ledger
from ecoformer.accounting import cost as cost_of
from ecoformer.accounting.layers import PARTS
from ecoformer.accounting.ledger import short
from ecoformer.attention.registry import attention_class
from ecoformer.bitfusion import ModelResult, simulate_model
from ecoformer.bitfusion.model import NOT_SIMULATED
from ecoformer.cli import common
from ecoformer.cli.common import NATIVE
from ecoformer.cli.sources import inputs_of, open_model
from ecoformer.conversion import convert

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
    `ecoformer cost pvt_v2_b0 --compare softmax,eco --on bitfusion`
    """
    common.exclude(("--attention", attention), ("--compare", compare))
    common.exclude(("--resolution", resolution), ("--tokens", tokens))
    for option, given in {"--accounting exact": accounting == "exact", "--energy": energy != ENERGY}.items():
        common.exclude(("--on", on), (option, given))
    names = [attention or NATIVE]
    if compare is not None:
        names = list(dict.fromkeys((NATIVE, *common.names_in(compare, "--compare"))))
    chosen = common.parse_settings(settings or [])
    common.check_settings(names, chosen)
    how: dict[str, Any] = {"accounting": accounting, "energy": energy}
    found: dict[str, Any] = {}
    with common.progress(as_json) as progress:
        for name in names:
            progress(f"counting {name}")
            built = open_model(model, resolution=resolution, tokens=tokens, shapes_only=True).model
            example = inputs_of(built, resolution, tokens)(1)
            if name != NATIVE:
                known = attention_class(name).settings()
                own = {key: value for key, value in chosen.items() if key in known}
                convert(built, name, example=example, **own)
            found[name] = simulate_model(built, example) if on else cost_of(built, example, **how)
    if as_json:
        facts = {name: each.to_dict() for name, each in found.items()}
        common.print_json(facts if compare is not None else facts[names[0]])
    elif on is not None:
        _print_cycles(found)
    elif compare is not None:
        _print(found)
    else:
        common.say(found[names[0]])


def _print(found: dict[str, Ledger]) -> None:
    """Print ledgers side by side."""
    rows = []
    for name, ledger in found.items():
        total = ledger.total
        amounts = {"mul (M)": total.mul / 1e6, "add (M)": total.add / 1e6}
        if total.bytes:
            amounts["MB"] = total.bytes / 1e6
        amounts["mJ"] = ledger.energy_pj / 1e9
        share = {"in attention": f"{ledger.shares()['attention']:.0%}"}
        rows.append({"attention": name} | {key: short(x) for key, x in amounts.items()} | share)
    common.print_table(["attention"], rows, list(rows[0])[1:])
    _print_uncounted(found)


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
