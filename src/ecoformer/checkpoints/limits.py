"""What a file may ask for: no more than its tensors hold.

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

from ecoformer.storage import CheckpointError, check_fit

_SMALL = 1 << 14
"""Numbers up to this are always fine: image sizes, windows, layers."""
_BYTES_PER_UNIT = 32
"""A vocabulary, a length or a width has a row of at least this many bytes for each of its units."""
_SPARE = 16
"""Layers are built as the library has them and then converted: tensors are made that no file holds."""


class Held(NamedTuple):
    """What a file holds."""

    tensors: int
    elements: int
    nbytes: int

    @classmethod
    def by(cls, tensors: Mapping[str, Tensor]) -> Held:
        """What these tensors hold."""
        sizes = [(x.numel(), x.nbytes) for x in tensors.values() if isinstance(x, Tensor)]
        return cls(len(sizes), sum(n for n, _ in sizes), sum(n for _, n in sizes))


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
    return build()
