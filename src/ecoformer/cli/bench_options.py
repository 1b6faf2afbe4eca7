"""Reading the options of `ecoformer bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.attention.registry import attention_class
from ecoformer.backends.choice import VARIABLE, default_backend
from ecoformer.benchmarking.measuring import no_progress
from ecoformer.benchmarking.models import Load
from ecoformer.cli.settings import names_in
from ecoformer.cli.sources import open_model
from ecoformer.running import NOT_TAKEN, eval_mode, run_on_meta


def read_shape(text: str) -> tuple[int, int, int, int]:
    """`B,H,N,D`."""
    numbers = read_numbers("--shape", text)
    if len(numbers) != 4:
        raise ValueError(f"--shape takes B,H,N,D, such as 1,1,3136,32, got {text!r}")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def read_numbers(option: str, text: str) -> list[int]:
    """`1,16`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{option} takes positive integers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def read_names(option: str, text: str, also: Sequence[str]) -> list[str]:
    """`softmax,eco`: mechanisms, or names in `also`."""
    names = names_in(text, option)
    for name in names:
        try:
            attention_class("softmax" if name in also else name)
        except ValueError as error:
            raise ValueError(f"{option}: {error}; also {', '.join(also)}") from error
    return names


def read_choice(option: str, text: str, known: dict[str, torch.dtype]) -> torch.dtype:
    """A dtype by its short name."""
    if text not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {text!r}")
    return known[text]


def read_device(name: str | None) -> torch.device:
    """The device to measure on."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: PyTorch sees {count} CUDA devices; use --device cpu")
    return torch.device(name)


def exclude(option: str, given: object, because: str) -> None:
    """Refuse an option that would be ignored."""
    if given not in (None, False):
        raise ValueError(f"{option} has no meaning {because}: leave it out")


def backend_notes() -> list[str]:
    """A note where the environment variable names a backend: a benchmark runs all of them."""
    if (name := default_backend()) is None:
        return []
    return [f"{VARIABLE}={name} is ignored: a benchmark runs every available backend"]


@contextmanager
def measuring(threads: int | None) -> Iterator[Callable[[str], None]]:
    """Set the number of CPU threads, and show progress on a terminal."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    console = Console(stderr=True)
    try:
        if console.is_terminal:
            with console.status("starting") as status:
                yield status.update
        else:
            yield no_progress
    finally:
        torch.set_num_threads(before)


def base_model(name: str, resolution: int | None, tokens: int | None, **how: Any) -> tuple[nn.Module, Load]:
    """A model before conversion, and its inputs; `how` goes to `Load`."""
    about: dict[str, Any] = {"model": name}
    flags: dict[str, Any] = {
        key.replace("_", " "): True for key in ("train", "channels_last") if how.get(key)
    }
    if how.get("amp") is not None:
        flags["autocast"] = str(how["amp"]).removeprefix("torch.")
    if name == "lra_text":
        exclude("--resolution", resolution, "for a text model")
        exclude("--channels-last", how.get("channels_last"), "for a text model")
        length = tokens or 4096
        from ecoformer.models.text import lra_text

        def texts(count: int) -> Tensor:
            return torch.randint(1, 257, (count, length), generator=torch.Generator().manual_seed(count))

        about |= {"tokens": length} | flags
        text_model = lra_text(attention="softmax", length=length).eval()
        return text_model, Load(texts, "tokens", about, per_sample=length, **how)
    exclude("--tokens", tokens, "for an image model")
    size = resolution or 224
    try:
        model = open_model(name, image_size=size).model
    except ModuleNotFoundError as error:
        hint = "pip install 'ecoformer[vision]', or use lra_text"
        raise ImportError(f"{name} needs {error.name}: {hint}") from error
    channels = getattr(model, "in_chans", 3)

    def images(count: int) -> Tensor:
        return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(count))

    try:
        with torch.no_grad(), eval_mode(model):
            run_on_meta(model, images(1))
    except NOT_TAKEN as error:
        what = f"images of {size} x {size} pixels (--resolution)"
        raise ValueError(f"{name} cannot take {what}: {one_line(error, 200)}") from error
    return model, Load(images, "images", about | {"resolution": size} | flags, **how)
