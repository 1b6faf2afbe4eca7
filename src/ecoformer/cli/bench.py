"""`ecoformer bench`: time, memory and energy; results are checked before they are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ecoformer.benchmarking.attention import (
    DTYPES,
    LONGEST,
    MECHANISMS,
    Setting,
    bench_attention,
    crossover_sentence,
    find_crossover,
    plot_lengths,
)
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.models import bench_fit, bench_models
from ecoformer.cli import bench_options as options
from ecoformer.cli.bench_tables import show
from ecoformer.cli.simulated import target
from ecoformer.conversion import convert
from ecoformer.hashing import KernelHasher

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="`cpu` or `cuda`; default: the GPU, if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: PyTorch's.", min=1, max=1024)]
Resolution = Annotated[int | None, typer.Option(help="Height and width of images; default: 224.", min=1)]
Tokens = Annotated[int | None, typer.Option(help="Tokens of a text; default: 4096.", min=1)]
Energy = Annotated[bool, typer.Option("--energy", help="Measure energy: NVML on a GPU, RAPL on a CPU.")]
Graphs = Annotated[bool, typer.Option("--graphs", help="Time CUDA graphs, without kernel launches.")]
Seconds = Annotated[float, typer.Option(help="Approximate seconds for each contestant.", min=0.01)]

bench = typer.Typer(
    help="Time, memory and energy, side by side in one run. Results are checked before they are timed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@bench.command()
def attention(
    shape: Annotated[list[str] | None, typer.Option(help="`B,H,N,D`; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="`fp32`, `bf16`, `fp16` or `fp64`.")] = "fp32",
    device: Device = None,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    mechanisms: Annotated[
        str, typer.Option(help="Names from `ecoformer info`; `explicit` forms the N x N matrix.")
    ] = ",".join(MECHANISMS),
    compile_: Annotated[
        bool, typer.Option("--compile", help="Also hashed attention by torch.compile.")
    ] = False,
    graphs: Graphs = False,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Find the N where eco overtakes SDPA.")
    ] = False,
    longest: Annotated[
        int | None, typer.Option(help=f"Where --crossover gives up; default: {LONGEST:,}.", min=16)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot time and memory against N: .png, .svg or .pdf.", callback=target),
    ] = None,
    energy: Energy = False,
    seconds: Seconds = 1.0,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Mechanisms from tokens to output, hashing included.

    Example: `ecoformer bench attention --shape 1,1,3136,32`
    """
    notes = options.backend_notes()
    if not crossover:
        options.exclude("--longest", longest, "without --crossover")
    shapes = [options.read_shape(text) for text in shape or ["1,1,3136,32"]]
    if plot is not None:
        shapes = _lengths(shapes)
    on, precision = options.read_device(device), options.read_choice("--dtype", dtype, DTYPES)
    names = options.read_names("--mechanisms", mechanisms, also=["explicit"])
    settings = [Setting(size, precision, on, causal, backward, compile_, seed) for size in shapes]
    with options.measuring(threads) as progress:
        how = Bench(on, seconds, graphs, energy=energy, progress=progress)
        run = bench_attention(settings, names, how)
        if crossover:
            quick = Bench(on, 0.2, graphs, progress=progress)
            run.more["crossover"] = find_crossover(settings[-1], quick, longest or LONGEST)
            run.notes.append(crossover_sentence(run.more["crossover"]))
    if plot is not None:
        plot_lengths(run, plot)
        run.notes.append(f"wrote {plot}")
    run.notes += notes
    show(run, as_json)


@bench.command()
def model(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A timm model's name, a checkpoint, a folder or `lra_text`."),
    ],
    attention: Annotated[
        str,
        typer.Option(help="Mechanisms; `native` is the model as it is, `explicit` forms the N x N matrix."),
    ] = "softmax,native,eco",
    resolution: Resolution = None,
    tokens: Tokens = None,
    batch: Annotated[str, typer.Option(help="Batch sizes: `1,16`.")] = "1",
    train: Annotated[bool, typer.Option("--train", help="Training steps instead of inference.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="All models by torch.compile.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Images channels last.")] = False,
    amp: Annotated[str | None, typer.Option(help="Autocast: `bf16` or `fp16`.")] = None,
    graphs: Graphs = False,
    device: Device = None,
    energy: Energy = False,
    seconds: Seconds = 2.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """A model with one mechanism or another: images or tokens per second.

    Example: `ecoformer bench model pvt_v2_b0 --attention softmax,native,explicit,eco --batch 1,16`
    """
    notes = options.backend_notes()
    names = options.read_names("--attention", attention, also=["explicit", "native"])
    sizes, on = options.read_numbers("--batch", batch), options.read_device(device)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = None if amp is None else options.read_choice("--amp", amp, half)
    with options.measuring(threads) as progress:
        how = Bench(on, seconds, graphs, energy=energy, progress=progress)
        base, load = options.base_model(
            name,
            resolution,
            tokens,
            train=train,
            compiled=compile_,
            channels_last=channels_last,
            amp=precision,
        )
        if graphs:
            load.about["graphs"] = True
        run = bench_models(base, names, load, sizes, how)
    run.notes += notes
    show(run, as_json)


@bench.command()
def fit(
    shape: Annotated[
        str | None, typer.Option(help="Tokens to learn from: `B,H,N,D`; default: `16,1,3136,32`.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of a code.", min=1)] = 16,
    support: Annotated[int, typer.Option(help="Support samples.", min=1)] = 25,
    name: Annotated[
        str | None, typer.Option("--model", help="Fit all hashers of this model instead.")
    ] = None,
    resolution: Resolution = None,
    tokens: Tokens = None,
    samples: Annotated[
        int | None, typer.Option(help="Images or texts to learn from; default: 16.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often to fit.", min=1)] = 3,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How long it takes to learn the hash functions of one hasher or of a model.

    Example: `ecoformer bench fit --shape 16,1,3136,32 --bits 16 --support 25`
    """
    on = options.read_device(device)
    with options.measuring(threads) as progress:
        if name is None:
            for option, given in (("resolution", resolution), ("tokens", tokens), ("samples", samples)):
                options.exclude(f"--{option}", given, "without --model")
            size = options.read_shape(shape or "16,1,3136,32")
            inputs = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(on)
            hasher = KernelHasher(size[1], size[3], bits, support).to(on)
            run = bench_fit(hasher, inputs, repeats=repeats, progress=progress)
        else:
            options.exclude("--shape", shape, "with --model")
            base, load = options.base_model(name, resolution, tokens)
            convert(base, "eco", bits=bits, support=support)
            batch = load.make(samples or 16).to(on)
            run = bench_fit(base.to(on).eval(), batch, name, repeats=repeats, progress=progress)
    show(run, as_json)


def _lengths(shapes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The shapes to plot: as given, or a single one with N, N/2, ... N/16."""
    if len({(b, h, d) for b, h, _, d in shapes}) > 1:
        raise ValueError("--plot plots against N: B, H and D of all --shape must be the same")
    if len(shapes) > 1:
        return sorted(shapes)
    batch, heads, tokens, dim = shapes[0]
    return [(batch, heads, n, dim) for n in sorted({max(1, tokens >> k) for k in range(5)})]
