"""`ecoformer simulate`: cycles and energy on BitFusion, the accelerator that the paper simulates."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ecoformer.bitfusion import FullyConnected, attention_layer, simulate_all
from ecoformer.bitfusion import simulate as simulate_op

simulate = typer.Typer(
    help="Cycles and energy on BitFusion, the accelerator that the paper simulates.", no_args_is_help=True
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@simulate.command()
def fc(
    rows: Annotated[int, typer.Option(help="Rows of the input.")],
    inputs: Annotated[int, typer.Option(help="Input channels.")],
    outputs: Annotated[int, typer.Option(help="Output channels.")],
    bits: Annotated[str, typer.Option(help="Bits of activations and weights.")] = "8x8",
    as_json: AsJson = False,
) -> None:
    """One fully connected operation.

    Example: `ecoformer simulate fc --rows 16 --inputs 32 --outputs 3136 --bits 8x8 --json`
    """
    sizes = bits.lower().split("x")
    if len(sizes) != 2 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"--bits takes activations x weights, such as 8x8 or 8x2, got {bits!r}")
    op = FullyConnected(rows, inputs, outputs, int(sizes[0]), int(sizes[1]))
    _show(simulate_op(op).to_dict(), as_json)


@simulate.command()
def layer(
    attention: Annotated[str, typer.Argument(help="`softmax` or `eco`.")] = "eco",
    batch: Annotated[int, typer.Option(help="Samples.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 3136,
    as_json: AsJson = False,
) -> None:
    """A whole attention layer of the paper's first stage: 32 channels, one head.

    Example: `ecoformer simulate layer eco --batch 16 --tokens 3136`
    """
    if attention not in ("softmax", "eco"):
        raise ValueError(f"the layer must be softmax or eco, got {attention!r}")
    mechanism: Any = attention
    _show(simulate_all(attention_layer(mechanism, batch=batch, tokens=tokens)).to_dict(), as_json)


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    stalls = facts["stall_cycles"]
    typer.echo(f"{facts['cycles']:,} cycles ({stalls:,} of them stalls), {facts['latency_s'] * 1e3:.4g} ms")
    typer.echo(f"{facts['energy_nj']:,.2f} nJ")
    for part, energy in facts["energy_parts_nj"].items():
        typer.echo(f"  {part:<18} {energy:>16,.2f}")
