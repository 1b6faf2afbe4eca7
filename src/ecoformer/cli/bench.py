"""`ecoformer bench`: time, memory and energy; results are checked before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn

from ecoformer.accounting.ledger import short
from ecoformer.attention.registry import attention_class
from ecoformer.backends.choice import VARIABLE, default_backend
from ecoformer.benchmarking import Row, Run
from ecoformer.benchmarking.attention import DTYPES, MECHANISMS, Setting, bench_attention
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.models import Load, bench_fit, bench_models
from ecoformer.cli import common
from ecoformer.cli.sources import inputs_of, open_model
from ecoformer.hashing import KernelHasher
from ecoformer.running import NOT_TAKEN, eval_mode, not_taken, run_on_meta

Device = Annotated[str | None, typer.Option(help="`cpu` or `cuda`; default: the GPU, if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: PyTorch's.", min=1, max=1024)]
Energy = Annotated[bool, typer.Option("--energy", help="Measure energy with Zeus: GPU (NVML) or CPU (RAPL).")]
Graphs = Annotated[bool, typer.Option("--graphs", help="Time CUDA graphs: no cost of launching kernels.")]
Seconds = Annotated[float, typer.Option(help="Approximate seconds for each contestant.", min=0.01)]

bench = typer.Typer(
    help="Time, memory and energy, side by side in one run. Results are checked before they are timed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@bench.command()
def attention(
    shape: Annotated[list[str] | None, typer.Option(help="`B,H,N,D`; may be repeated.")] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "fp64"], typer.Option(help="Of the inputs.")] = "fp32",
    device: Device = None,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    mechanisms: Annotated[
        str,
        typer.Option(
            help="Names from `ecoformer info`; `explicit` forms the N x N matrix. "
            f"Default: {', '.join(MECHANISMS)}.",
            show_default=False,
        ),
    ] = ",".join(MECHANISMS),
    compile_: Annotated[
        bool, typer.Option("--compile", help="Also time hashed attention under torch.compile.")
    ] = False,
    graphs: Graphs = False,
    energy: Energy = False,
    seconds: Seconds = 1.0,
    threads: Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Compare mechanisms from tokens to output, hashing included.

    Example: `ecoformer bench attention --shape 1,1,3136,32`
    """
    shapes = [_shape(text) for text in shape or ["1,1,3136,32"]]
    names, on = _mechanisms("--mechanisms", mechanisms, ["explicit"]), _device(device)
    settings = [Setting(size, DTYPES[dtype], on, causal, backward, compile_) for size in shapes]
    with _measuring(threads, as_json) as progress:
        how = Bench(on, seconds, graphs, energy=energy, progress=progress)
        run = bench_attention(settings, names, how)
    _show(run, as_json)


@bench.command()
def model(
    name: common.Model,
    attention: Annotated[
        str,
        typer.Option(
            help="Mechanisms; `native` is the model as it is, `explicit` forms the N x N matrix. "
            "Default: softmax, native, eco, sharp_eco.",
            show_default=False,
        ),
    ] = "softmax,native,eco,sharp_eco",
    resolution: common.Resolution = None,
    tokens: common.Tokens = None,
    batch: Annotated[str, typer.Option(help="Batch sizes: `1,16`.")] = "1",
    train: Annotated[bool, typer.Option("--train", help="Training steps instead of inference.")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Run all models under torch.compile.")] = False,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Images channels last.")] = False,
    amp: Annotated[Literal["bf16", "fp16"] | None, typer.Option(help="Autocast.")] = None,
    graphs: Graphs = False,
    device: Device = None,
    energy: Energy = False,
    seconds: Seconds = 2.0,
    threads: Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Compare mechanisms in one model: images or tokens per second.

    Example: `ecoformer bench model pvt_v2_b0 --attention softmax,native,explicit,eco --batch 1,16`
    """
    names = _mechanisms("--attention", attention, ["explicit", "native"])
    sizes, on = _numbers("--batch", batch), _device(device)
    common.exclude(("--resolution", resolution), ("--tokens", tokens))
    precision = None if amp is None else DTYPES[amp]
    flags: dict[str, Any] = {"train": train, "channels last": channels_last, "graphs": graphs}
    flags["autocast"] = precision and str(precision).removeprefix("torch.")
    built, about, inputs = _model_and_inputs(name, resolution, tokens)
    load = Load(
        inputs,
        about | {flag: value for flag, value in flags.items() if value},
        train=train,
        compiled=compile_,
        channels_last=channels_last,
        amp=precision,
    )
    with _measuring(threads, as_json) as progress:
        how = Bench(on, seconds, graphs, energy=energy, progress=progress)
        run = bench_models(built, names, load, sizes, how)
    _show(run, as_json)


@bench.command()
def fit(
    shape: Annotated[str, typer.Option(help="Tokens to learn from: `B,H,N,D`.")] = "16,1,3136,32",
    bits: Annotated[int, typer.Option(help="Bits of a code.", min=1)] = 16,
    support: Annotated[int, typer.Option(help="Support samples.", min=1)] = 25,
    repeats: Annotated[int, typer.Option(help="How often to fit.", min=1)] = 3,
    device: Device = None,
    threads: Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Time how long one hasher takes to learn its hash functions.

    Example: `ecoformer bench fit --shape 16,1,3136,32 --bits 16 --support 25`
    """
    size, on = _shape(shape), _device(device)
    tokens = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(on)
    with _measuring(threads, as_json) as progress:
        progress(f"fitting {repeats} times")
        run = bench_fit(KernelHasher(size[1], size[3], bits, support).to(on), tokens, repeats)
    _show(run, as_json)


def _model_and_inputs(
    name: str, resolution: int | None, tokens: int | None
) -> tuple[nn.Module, dict[str, Any], Callable[[int], Tensor]]:
    """A model before conversion, what rows say about it, and a function that makes a batch of inputs."""
    model = open_model(name, resolution=resolution, tokens=tokens).model
    size, inputs = inputs_of(model, resolution, tokens)
    try:
        with torch.no_grad(), eval_mode(model):
            run_on_meta(model, inputs(1))
    except NOT_TAKEN as error:
        raise not_taken(model, inputs(1), error) from error
    return model, {"model": name} | size, inputs


def _shape(text: str) -> tuple[int, int, int, int]:
    numbers = _numbers("--shape", text)
    if len(numbers) != 4:
        raise ValueError(f"--shape takes B,H,N,D, such as 1,1,3136,32, got {text!r}")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{option} takes positive integers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def _mechanisms(option: str, text: str, also: Sequence[str]) -> list[str]:
    """Names of mechanisms, or names in `also`."""
    names = common.names_in(text, option)
    for name in names:
        try:
            attention_class("softmax" if name in also else name)
        except ValueError as error:
            raise ValueError(f"{option}: {error}; also {', '.join(also)}") from error
    return names


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in known or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device must be one of {', '.join(known)} that PyTorch sees, got {name!r}")
    return torch.device(name)


@contextmanager
def _measuring(threads: int | None, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Set the number of CPU threads, and show progress."""
    default_backend()  # refuses a wrong name in the environment
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with common.progress(as_json) as show:
            yield show
    finally:
        torch.set_num_threads(before)


def _show(run: Run, as_json: bool) -> None:
    """Print a run in tables; the exit status is 1 if a result was wrong."""
    if (name := default_backend()) is not None:
        run.notes.append(f"{VARIABLE}={name} is ignored: a benchmark runs every available backend")
    if as_json:
        common.print_json(run.to_dict())
    else:
        common.say(f"{run.device}, CPU threads: {run.threads}")
        for title, rows in groupby(run.rows, key=_title):
            _print(title, list(rows))
        for note in run.notes:
            common.say(note)
    if run.wrong:
        raise typer.Exit(1)


def _title(row: Row) -> str:
    words = []
    for key, value in row.setting.items():
        if isinstance(value, bool):
            words += [key] if value else []
        elif isinstance(value, list):
            words.append(f"({', '.join(map(str, value))})")
        else:
            words.append(value if key in ("dtype", "model") else f"{key} {value}")
    return ", ".join(words)


def _print(title: str, rows: list[Row]) -> None:
    """Columns that no row fills are left out; failures are listed below."""
    cells = [_cells(row) for row in rows]
    figures = [name for name in list(cells[0])[2:] if any(row[name] for row in cells)]
    common.say(f"\n{title}")
    common.print_table(["mechanism", "backend"], cells, figures)
    for row in rows:
        if row.failure:
            common.say(f"{row.label}: {row.failure}")


def _cells(row: Row) -> dict[str, str]:
    timing, check = row.timing, row.checked
    return {
        "mechanism": row.mechanism,
        "backend": row.backend,
        "ms": short(timing.median_ms if timing else None),
        "quartiles": f"{short(timing.low_ms)}–{short(timing.high_ms)}" if timing else "",
        f"{row.counted}/s": short(row.per_second),
        "speed\nSDPA = 1": short(row.ratio_to_sdpa),
        "MB": short(row.peak_mb),
        "mJ": short(row.energy["per_item_joules"] * 1e3 if row.energy else None),
        "error": f"{check.error:.0e}" if check is not None and check.passed else "",
    }
