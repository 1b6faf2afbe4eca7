"""`ecoformer simulate`: cycles and energy on BitFusion, the accelerator that the paper simulates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ecoformer.accounting.sweeps import NATIVE
from ecoformer.bitfusion import (
    PAPER_ARRAY,
    BitFusion,
    Convolution,
    FullyConnected,
    attention_layer,
    printed_table,
    printed_work,
    simulate_all,
    simulate_model,
)
from ecoformer.bitfusion import simulate as simulate_op
from ecoformer.cli.settings import counted_model, mechanisms_in, names_in, swept
from ecoformer.cli.simulated import Run, draw, show, show_table, target
from ecoformer.report.style import readable

simulate = typer.Typer(
    help="Cycles and energy on BitFusion, the accelerator that the paper simulates.", no_args_is_help=True
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Bits = Annotated[str, typer.Option(help="Bits of activations and weights.")]
CodeBits = Annotated[
    int | None,
    typer.Option(help="Bits that move one bit of a code. Default: as activations, as in the paper.", min=1),
]
Array = Annotated[
    Path | None, typer.Option(help="A JSON file with settings of the array. Default: the paper's.")
]
Picture = Annotated[
    Path | None,
    typer.Option("--figure", help="Draw where time and energy go: .png, .svg or .pdf.", callback=target),
]
Compare = Annotated[
    str | None, typer.Option(help="Mechanisms side by side: `softmax,eco`; of a model also `native`.")
]


@simulate.command()
def fc(
    rows: Annotated[int, typer.Option(help="Rows of the input.")],
    inputs: Annotated[int, typer.Option(help="Input channels.")],
    outputs: Annotated[int, typer.Option(help="Output channels.")],
    bits: Bits = "8x8",
    array: Array = None,
    sweep: Annotated[str | None, typer.Option(help="`rows=16,64,256`, or inputs, or outputs.")] = None,
    figure: Picture = None,
    as_json: AsJson = False,
) -> None:
    """One fully connected operation.

    Example: `ecoformer simulate fc --rows 16 --inputs 32 --outputs 3136 --bits 8x8 --json`
    """
    chosen, widths = _array(array), _bits(bits)
    runs = [
        Run(about, simulate_op(FullyConnected(**sizes, **widths), chosen))
        for about, sizes in swept(sweep, {"rows": rows, "inputs": inputs, "outputs": outputs})
    ]
    show(runs, as_json, figure, many=sweep is not None)


@simulate.command()
def conv(
    in_channels: Annotated[int, typer.Option(help="Channels of the input.")],
    out_channels: Annotated[int, typer.Option(help="Channels of the output.")],
    resolution: Annotated[int, typer.Option(help="Height and width of the input.")],
    kernel: Annotated[int, typer.Option(help="Height and width of the kernel.")] = 3,
    stride: Annotated[int, typer.Option(help="Stride along both axes.")] = 1,
    padding: Annotated[int | None, typer.Option(help="Zeros on each side. Default: half the kernel.")] = None,
    dilation: Annotated[int, typer.Option(help="Distance of the kernel's taps.")] = 1,
    groups: Annotated[int, typer.Option(help="Groups of channels; as many as channels: depth-wise.")] = 1,
    batch: Annotated[int, typer.Option(help="Samples.")] = 1,
    bits: Bits = "8x8",
    array: Array = None,
    sweep: Annotated[str | None, typer.Option(help="`resolution=56,112,224`, or batch.")] = None,
    figure: Picture = None,
    as_json: AsJson = False,
) -> None:
    """One convolution of an image.

    Example: `ecoformer simulate conv --in-channels 128 --out-channels 128 --resolution 56 --groups 128`
    """
    chosen, runs = _array(array), []
    around = kernel // 2 * dilation if padding is None else padding
    same = {"kernel": kernel, "stride": stride, "padding": around, "dilation": dilation, "groups": groups}
    for about, sizes in swept(sweep, {"resolution": resolution, "batch": batch}):
        side = sizes["resolution"]
        op = Convolution(
            sizes["batch"], in_channels, out_channels, height=side, width=side, **same, **_bits(bits)
        )
        runs.append(Run(about, simulate_op(op, chosen)))
    show(runs, as_json, figure, many=sweep is not None)


@simulate.command()
def layer(
    attention: Annotated[str, typer.Argument(help="A mechanism, such as `softmax` or `eco`.")] = "eco",
    compare: Compare = None,
    batch: Annotated[int, typer.Option(help="Samples.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 3136,
    code_bits: CodeBits = None,
    array: Array = None,
    sweep: Annotated[str | None, typer.Option(help="`tokens=196,784,3136`, or batch.")] = None,
    figure: Picture = None,
    as_json: AsJson = False,
) -> None:
    """An attention layer of the paper's first stage: 32 channels, one head.

    Example: `ecoformer simulate layer eco --sweep tokens=196,784,3136`
    """
    chosen, runs = _array(array), []
    for name in names_in(compare, "--compare") or [attention]:
        for about, sizes in swept(sweep, {"batch": batch, "tokens": tokens}):
            work = attention_layer(name, code_bits=code_bits, **sizes)
            runs.append(Run({"attention": name} | about, simulate_all(work, chosen)))
    show(runs, as_json, figure, many=sweep is not None or compare is not None)


@simulate.command()
def model(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A timm model's name, a checkpoint, or a folder.")
    ],
    attention: Annotated[
        str | None, typer.Option(help="Convert the model first. Default: simulate it as it is.")
    ] = None,
    compare: Compare = None,
    resolution: Annotated[int, typer.Option(help="Height and width of the image.", min=1)] = 224,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the text, for text models.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Samples.", min=1)] = 1,
    bits: Bits = "8x8",
    code_bits: CodeBits = None,
    array: Array = None,
    sweep: Annotated[str | None, typer.Option(help="`resolution=224,448`, or tokens, or batch.")] = None,
    figure: Picture = None,
    as_json: AsJson = False,
) -> None:
    """A complete model: every linear layer, convolution and product of attention.

    BitFusion does not compute normalisation, activations and softmax, so no figure includes them.

    Example: `ecoformer simulate model pvt_v2_b0 --compare softmax,eco --resolution 224`
    """
    chosen, (values, weights), runs = _array(array), _bits(bits).values(), []
    size = {"resolution": resolution} if tokens is None else {"tokens": tokens}
    if sweep is not None and sweep.partition("=")[0].strip() == "tokens" and tokens is None:
        size = {"tokens": 1}
    for mechanism in mechanisms_in(attention, compare):
        for about, sizes in swept(sweep, {**size, "batch": batch}):
            built, example = counted_model(name, mechanism, **sizes)
            result = simulate_model(built, example, bits=(values, weights), code_bits=code_bits, array=chosen)
            runs.append(Run({"attention": mechanism or NATIVE} | about, result.total, result.to_dict()))
    show(runs, as_json, figure, many=sweep is not None or compare is not None)


@simulate.command()
def table(figure: Picture = None, as_json: AsJson = False) -> None:
    """The paper's hardware table in its own reading: 16 query rows, 3136 keys, 32 channels.

    Example: `ecoformer simulate table --figure table.png`
    """
    rows = printed_table()
    runs = []
    for row in rows:
        name = readable(row["method"]) + (" (ours)" if row["reading"] == "ours" else "")
        runs.append(Run({"method": name}, simulate_all(printed_work(row["method"])), row))
    draw(runs, figure, divide_by=16)
    show_table(rows, as_json)


def _bits(text: str) -> dict[str, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"--bits takes activations x weights, such as 8x8 or 8x2, got {text!r}")
    return {"activation_bits": int(sizes[0]), "weight_bits": int(sizes[1])}


def _array(path: Path | None) -> BitFusion:
    if path is None:
        return PAPER_ARRAY
    if not path.is_file():
        raise FileNotFoundError(f"--array takes a JSON file: there is no file {path}")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--array {path} is not valid JSON: {error}") from error
    return BitFusion.from_dict(content)
