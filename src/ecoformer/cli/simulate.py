"""`ecoformer simulate`: cycles and energy on BitFusion, the accelerator that the paper simulates."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ecoformer.bitfusion import Total, simulate_layer, simulate_model
from ecoformer.bitfusion import simulate as simulate_op
from ecoformer.cli import common
from ecoformer.operations import Product

simulate = typer.Typer(
    help="Cycles and energy on BitFusion, the accelerator that the paper simulates.", no_args_is_help=True
)
Bits = Annotated[str, typer.Option(help="Bits of activations and weights.")]
CodeBits = Annotated[
    int | None,
    typer.Option(help="Bits that move one bit of a code; default: as activations, as in the paper.", min=1),
]


@simulate.command()
def fc(
    rows: Annotated[int, typer.Option(help="Rows of the input.")],
    inputs: Annotated[int, typer.Option(help="Input channels.")],
    outputs: Annotated[int, typer.Option(help="Output channels.")],
    bits: Bits = "8x8",
    as_json: common.AsJson = False,
) -> None:
    """One fully connected operation.

    Example: `ecoformer simulate fc --rows 16 --inputs 32 --outputs 3136 --bits 8x8 --json`
    """
    result = simulate_op(Product(rows, inputs, outputs), _bits(bits))
    if as_json:
        common.print_json(result.to_dict())
    else:
        _print({f"{rows} x {inputs} x {outputs}": result})


@simulate.command()
def layer(
    compare: common.Compare = "softmax,eco,sharp_eco",
    batch: Annotated[int, typer.Option(help="Samples.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 3136,
    code_bits: CodeBits = None,
    as_json: common.AsJson = False,
) -> None:
    """An attention layer of the paper's first stage: 32 channels, one head.

    Example: `ecoformer simulate layer --compare softmax,eco --tokens 784`
    """
    totals = {
        name: simulate_layer(name, batch=batch, tokens=tokens, code_bits=code_bits)
        for name in common.names_in(compare, "--compare")
    }
    if as_json:
        common.print_json({name: total.to_dict() for name, total in totals.items()})
    else:
        _print(totals)


@simulate.command()
def model(
    name: common.Model,
    compare: common.Compare = common.NATIVE,
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    batch: Annotated[int, typer.Option(help="Samples.", min=1)] = 1,
    bits: Bits = "8x8",
    code_bits: CodeBits = None,
    as_json: common.AsJson = False,
) -> None:
    """A complete model: every linear layer, convolution and product of attention.

    BitFusion does not compute normalisation, activations and softmax, so no figure includes them.

    Example: `ecoformer simulate model pvt_v2_b0 --compare softmax,eco --resolution 224`
    """
    common.exclude(("--resolution", resolution), ("--tokens", tokens))
    results = {}
    for mechanism in common.names_in(compare, "--compare"):
        built, example = common.counted_model(
            name, mechanism, batch=batch, resolution=resolution, tokens=tokens
        )
        results[mechanism] = simulate_model(built, example, bits=_bits(bits), code_bits=code_bits)
        if not results[mechanism].total.cycles:
            raise ValueError(f"BitFusion simulates no layer of {name}: it has no linear layer or convolution")
    facts = {mechanism: result.to_dict() for mechanism, result in results.items()}
    if as_json:
        common.print_json(facts)
        return
    _print({mechanism: result.total for mechanism, result in results.items()})
    for mechanism, found in facts.items():
        parts = (
            f"{part} {each['energy_nj'] / found['energy_nj']:.0%}" for part, each in found["parts"].items()
        )
        common.say(f"energy of {mechanism}: {', '.join(parts)}")
        if found["uncounted"]:
            common.say(f"not counted ({mechanism}): {', '.join(found['uncounted'])}")
    common.say(f"not simulated: {found['not_simulated']}")


def _bits(text: str) -> tuple[int, int]:
    activations, _, weights = text.partition("x")
    if not (activations.isdecimal() and weights.isdecimal()):
        raise ValueError(f"--bits takes activations x weights, such as 8x8 or 8x2, got {text!r}")
    return int(activations), int(weights)


def _print(totals: dict[str, Total]) -> None:
    rows: list[dict[str, Any]] = [
        {
            "": name,
            "cycles": f"{total.cycles:,}",
            "stalls": f"{total.stall_cycles / total.cycles:.0%}",
            "ms": f"{total.latency_s * 1e3:.4g}",
            "mJ": f"{total.energy_nj / 1e6:.4g}",
            "in DRAM": f"{total.energy.dram / total.energy_nj:.0%}",
        }
        for name, total in totals.items()
    ]
    common.print_table([""], rows, list(rows[0])[1:])
