"""What a file may ask for: no more than its tensors hold, pictures of sane sizes, and nothing of the Hub.

A description of 600 bytes can name a model of any size. Numbers in it are checked first, then the model is
built on the meta device, which takes no memory, and building stops once the model has outgrown the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ecoformer.storage import CheckpointError, check_fit, identity

_SMALL = 1 << 14
"""Numbers up to this are always fine: image sizes, windows, layers."""
_BYTES_PER_UNIT = 32
"""A vocabulary, a length or a width has a row of at least this many bytes for each of its units."""
_SPARE = 16
"""Layers are built as the library has them and then converted: tensors are made that no file holds."""
_LARGEST_SIDE = 2048
"""Of a picture, in pixels; before it is cropped twice as many."""
_OFFLINE = threading.RLock()


class Held(NamedTuple):
    """What a file holds; tied tensors count once."""

    tensors: int
    elements: int
    nbytes: int

    @classmethod
    def by(cls, tensors: Mapping[str, Tensor]) -> Held:
        """What these tensors hold."""
        own = {identity(name, x): x for name, x in tensors.items() if isinstance(x, Tensor)}.values()
        return cls(len(own), sum(x.numel() for x in own), sum(x.nbytes for x in own))


def check_numbers(description: Mapping[str, Any], held: Held, source: str) -> None:
    """Refuse a description with numbers that no model of these tensors could have."""
    limit = max(_SMALL, held.nbytes // _BYTES_PER_UNIT)
    for part in ("model", "conversions"):
        for name, value in _numbers(description[part], part):
            if abs(value) > limit:
                asked = f"{name}={str(value)[:24]}"
                raise CheckpointError(f"{source} asks for {asked}, but its tensors allow {limit} at most")
    steps = sum(len(record["layers"]) for record in description["conversions"])
    if steps > _SPARE * held.tensors:
        raise CheckpointError(f"{source} converts {steps} layers but holds {held.tensors} tensors")
    check_images(description["model"].get("images", {}), source)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Every size in a description by its name; those of a list count together."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key != "seed" and not key.endswith("_id"):
                yield from _numbers(item, key)
    elif isinstance(value, list):
        found = [number for item in value for number in _numbers(item, name)]
        yield from found
        yield name, sum(abs(number) for key, number in found if key == name)
    elif isinstance(value, int):
        yield name, value


def check_images(settings: Any, source: str) -> None:
    """Refuse settings of timm or transformers by which a picture would take gigabytes when resized."""
    share = settings.get("crop_pct") if isinstance(settings, dict) else None
    if share is not None and not (isinstance(share, (int, float)) and 0.5 <= share <= 2):
        raise CheckpointError(f"{source} sets crop_pct={str(share)[:24]} for images: 0.5 to 2 is allowed")
    if isinstance(settings, (dict, list, tuple)):
        for value in settings.values() if isinstance(settings, dict) else settings:
            check_images(value, source)
    elif isinstance(settings, (int, float)) and not abs(settings) <= _LARGEST_SIDE:
        side = str(settings)[:24]
        raise CheckpointError(f"{source} sets a size of {side} for images: {_LARGEST_SIDE} is allowed")


@contextmanager
def offline() -> Iterator[None]:
    """Let the libraries of Hugging Face open local files only; a config may name models on the Hub."""
    from huggingface_hub import constants

    with _OFFLINE:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


@contextmanager
def within(held: Held, source: str) -> Iterator[None]:
    """Stop building a model in this thread once it has outgrown a file that holds so much."""
    thread = threading.get_ident()
    modules, elements = _SPARE * (64 + 2 * held.tensors), _SPARE * ((1 << 16) + held.elements)

    def count(module: nn.Module, name: str, new: Tensor | nn.Module | None) -> None:
        nonlocal modules, elements
        if threading.get_ident() != thread:
            return
        modules -= 1
        elements -= new.numel() if isinstance(new, Tensor) else 0
        if modules < 0 or elements < 0:
            raise CheckpointError(f"{source} describes a larger model than its tensors can fill")

    with ExitStack() as stack:
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            stack.callback(register(count).remove)
        yield


def build_within(build: Callable[[], nn.Module], tensors: Mapping[str, Tensor], source: str) -> nn.Module:
    """Build a model twice: without data, to see that the tensors fit it, and then for real."""
    with torch.device("meta"), within(Held.by(tensors), source):
        rehearsal = build()
    check_fit(rehearsal, tensors, source=source)
    if problem := untied(tensors, rehearsal.state_dict()):
        raise CheckpointError(f"{source} does not fit {type(rehearsal).__name__}: {problem}")
    return build()


def untied(held: Mapping[str, Tensor], asked: Mapping[str, Tensor]) -> str | None:
    """A problem if tensors that are `held` once would become several."""
    few, many = Held.by(held).elements, Held.by(asked).elements
    return f"its tied tensors hold {few} numbers, untied {many}" if many > few else None
