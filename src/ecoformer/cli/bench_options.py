"""What the commands of `ecoformer bench` take, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console

from ecoformer.attention.registry import attention_class
from ecoformer.backends.choice import VARIABLE, asked_for
from ecoformer.cli.settings import names_in

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="`cpu` or `cuda`; by default the GPU, if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default PyTorch's.", min=1, max=1024)]
Resolution = Annotated[
    int | None, typer.Option(help="Height and width of images: 224 if nothing is said.", min=1)
]
Tokens = Annotated[int | None, typer.Option(help="Tokens of a text: 4096 if nothing is said.", min=1)]
Energy = Annotated[
    bool, typer.Option("--energy", help="Measure energy too, by NVML on a GPU, by RAPL on a CPU.")
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="Time CUDA graphs of all: what launches kernels is not counted.")
]


def read_shape(text: str) -> tuple[int, int, int, int]:
    """`B,H,N,D`."""
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape takes B,H,N,D, four whole numbers such as 1,1,3136,32, got {text!r}")
    batch, heads, tokens, dim = (int(part) for part in parts)
    if min(batch, heads, tokens, dim) < 1:
        raise ValueError(f"--shape must have at least 1 everywhere, got {text!r}")
    return batch, heads, tokens, dim


def read_numbers(option: str, text: str) -> list[int]:
    """`1,16`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{option} takes whole numbers from 1 on, such as 1,16, got {text!r}")
    return [int(part) for part in parts]


def read_names(option: str, text: str) -> list[str]:
    """`softmax,eco`."""
    names = names_in(text, option)
    for name in names:
        try:
            attention_class("softmax" if name == "explicit" else name)
        except ValueError as error:
            also = " and explicit" if "known are" in str(error) else ""
            raise ValueError(f"{option}: {error}{also}") from error
    return names


def exclude(option: str, given: object, because: str) -> None:
    """Refuse an option that would be ignored."""
    if given not in (None, False):
        raise ValueError(f"{option} has no meaning {because}: leave it out")


def backend_notes() -> list[str]:
    """A note where the environment variable names a backend, which is checked: a benchmark runs all."""
    wanted = asked_for()
    if wanted is None:
        return []
    return [f"{VARIABLE}={wanted} is set; a benchmark runs every backend that can, one by one"]


def read_choice(option: str, text: str, known: dict[str, torch.dtype]) -> torch.dtype:
    """A dtype by its short name."""
    if text not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {text!r}")
    return known[text]


def read_device(name: str | None) -> torch.device:
    """The device to measure on."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu"
        )
    return device


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update
