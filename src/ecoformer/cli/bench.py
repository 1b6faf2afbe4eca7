"""`ecoformer bench`: times, memory and energy; no time for a wrong result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ecoformer.benchmarking.attention import DTYPES, MECHANISMS, bench_attention
from ecoformer.benchmarking.crossover import LONGEST, find_crossover
from ecoformer.benchmarking.fitting import bench_fit, bench_model_fit
from ecoformer.benchmarking.graphs import require_graphs
from ecoformer.benchmarking.models import bench_models
from ecoformer.benchmarking.operators import Setting
from ecoformer.benchmarking.plot import plot_lengths
from ecoformer.benchmarking.timing import threads as thread_count
from ecoformer.cli.bench_models import base_model
from ecoformer.cli.bench_options import (
    AsJson,
    Device,
    Energy,
    Graphs,
    Resolution,
    Threads,
    Tokens,
    backend_notes,
    exclude,
    progress,
    read_choice,
    read_device,
    read_names,
    read_numbers,
    read_shape,
)
from ecoformer.cli.bench_tables import show
from ecoformer.cli.simulated import target
from ecoformer.conversion import convert

bench = typer.Typer(
    help="Times, memory and energy, side by side in one run; no time for a wrong result.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@bench.command()
def attention(
    shape: Annotated[list[str] | None, typer.Option(help="`B,H,N,D`; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="`fp32`, `bf16`, `fp16` or `fp64`.")] = "fp32",
    device: Device = None,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Every token sees those up to itself.")] = False,
    mechanisms: Annotated[
        str, typer.Option(help="Names as `ecoformer info` lists them; `explicit` forms the N x N matrix.")
    ] = ",".join(MECHANISMS),
    compile_: Annotated[
        bool, typer.Option("--compile", help="Hashed attention by torch.compile too.")
    ] = False,
    graphs: Graphs = False,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Find the N from which eco is faster than SDPA.")
    ] = False,
    longest: Annotated[
        int | None, typer.Option(help=f"Where --crossover gives up: {LONGEST:,} if nothing is said.", min=16)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw time and memory against N: .png, .svg or .pdf.", callback=target),
    ] = None,
    energy: Energy = False,
    seconds: Annotated[float, typer.Option(help="Seconds to time each contestant, about.", min=0.01)] = 1.0,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Mechanisms from tokens to output, hashing included.

    Example: `ecoformer bench attention --shape 1,1,3136,32`
    """
    notes = backend_notes()
    if not crossover:
        exclude("--longest", longest, "without --crossover")
    shapes = [read_shape(text) for text in shape or ["1,1,3136,32"]]
    if plot is not None:
        shapes = _lengths(shapes)
    on, precision = read_device(device), read_choice("--dtype", dtype, DTYPES)
    settings = [Setting(size, precision, on, causal, backward, compile_, seed, graphs) for size in shapes]
    names = read_names("--mechanisms", mechanisms)
    with thread_count(threads), progress() as tell:
        run = bench_attention(settings, names, seconds=seconds, energy=energy, progress=tell)
        if crossover:
            found = find_crossover(settings[-1], longest=longest or LONGEST, progress=tell)
            run.more["crossover"] = found.to_dict()
            run.notes.append(str(found))
    if plot is not None:
        plot_lengths(run, plot)
        run.notes.append(f"wrote {plot}")
    run.notes += notes
    show(run, as_json)


@bench.command()
def model(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A timm model's name, a checkpoint, a folder, `lra_text`.")
    ],
    attention: Annotated[
        str, typer.Option(help="Mechanisms; `explicit` is softmax with its N x N matrix.")
    ] = "softmax,eco",
    resolution: Resolution = None,
    tokens: Tokens = None,
    batch: Annotated[str, typer.Option(help="Samples of a batch: `1,16`.")] = "1",
    train: Annotated[bool, typer.Option("--train", help="Training steps, not inference.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="All models by torch.compile.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Images channels last.")] = False,
    amp: Annotated[str | None, typer.Option(help="Autocast: `bf16` or `fp16`.")] = None,
    graphs: Graphs = False,
    device: Device = None,
    energy: Energy = False,
    seconds: Annotated[float, typer.Option(help="Seconds to time each contestant, about.", min=0.01)] = 2.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """A whole model with one mechanism or another: images or tokens a second.

    Example: `ecoformer bench model pvt_v2_b0 --attention softmax,explicit,eco --batch 1,16`
    """
    notes = backend_notes()
    names, sizes, on = (
        read_names("--attention", attention),
        read_numbers("--batch", batch),
        read_device(device),
    )
    if graphs:
        require_graphs(on)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    base, load = base_model(
        name,
        resolution,
        tokens,
        train=train,
        compiled=compile_,
        channels_last=channels_last,
        amp=None if amp is None else read_choice("--amp", amp, half),
        graphs=graphs,
    )
    with thread_count(threads), progress() as tell:
        run = bench_models(base, names, load, sizes, on, seconds=seconds, energy=energy, progress=tell)
    run.notes += notes
    show(run, as_json)


@bench.command()
def fit(
    shape: Annotated[
        str | None, typer.Option(help="Tokens to learn from: `B,H,N,D`; `16,1,3136,32` if nothing is said.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of a code.", min=1)] = 16,
    support: Annotated[int, typer.Option(help="Support samples.", min=1)] = 25,
    name: Annotated[
        str | None, typer.Option("--model", help="Fit all hashers of this model instead.")
    ] = None,
    resolution: Resolution = None,
    tokens: Tokens = None,
    samples: Annotated[
        int | None, typer.Option(help="Images or texts to learn from: 16 if nothing is said.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often to fit.", min=1)] = 3,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How long hash functions take to learn: a hasher's, or all of a model's.

    Example: `ecoformer bench fit --shape 16,1,3136,32 --bits 16 --support 25`
    """
    on = read_device(device)
    with thread_count(threads), progress() as tell:
        if name is None:
            for option, given in (("resolution", resolution), ("tokens", tokens), ("samples", samples)):
                exclude(f"--{option}", given, "without --model")
            size = read_shape(shape or "16,1,3136,32")
            run = bench_fit(size, on, bits=bits, support=support, repeats=repeats, progress=tell)
        else:
            exclude("--shape", shape, "with --model")
            base, load = base_model(name, resolution, tokens)
            convert(base, "eco", bits=bits, support=support)
            batch = load.make(samples or 16).to(on)
            run = bench_model_fit(base.to(on).eval(), batch, name, repeats=repeats, progress=tell)
    show(run, as_json)


def _lengths(shapes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The lengths to draw: as given or, of a single one, its halves and quarters."""
    if len({(b, h, d) for b, h, _, d in shapes}) > 1:
        raise ValueError("--plot draws against N: the shapes must agree in all else")
    if len(shapes) > 1:
        return sorted(shapes)
    batch, heads, tokens, dim = shapes[0]
    return [(batch, heads, n, dim) for n in sorted({max(1, tokens >> k) for k in range(5)})]
