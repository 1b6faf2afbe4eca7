"""The launches of a call, worked out once for its shapes and repeated with the addresses of other tensors.

Working out memory, grids and configurations in Python takes longer than many kernels run. So does Triton's
binder, which inspects every argument of every launch to find the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped, unused-ignore]

from ecoformer.backends.fused import CannotRun
from ecoformer.backends.triton.hashing import INTERPRETED

DIRECT = not INTERPRETED.value
"""Whether launches are repeated without Triton's binder; the interpreter has no compiled code."""
_ALIGNED = 256
"""Alignment of scratch memory in bytes."""
_MOST = 1024
"""Plans to keep, so that lengths that never come back do not fill the memory."""
_SCRATCH = -1

Tensors = Sequence[Tensor | None]
Shrink = Callable[[], object]
"""Switches to a smaller configuration; returns None if there is none."""


class Slot:
    """Stands for a tensor in a plan: its index among the tensors of a call, and its shape."""

    def __init__(
        self,
        source: int,
        shape: Sequence[int],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        offset: int = 0,
    ) -> None:
        self.source, self.shape, self.strides, self.dtype, self.offset = source, shape, strides, dtype, offset


class Launch(NamedTuple):
    """One kernel's launch."""

    function: Any
    programs: int
    arguments: tuple[Any, ...]
    """Places and numbers."""
    named: dict[str, Any]
    """Compile-time constants and launch options."""
    shrink: Shrink


class Ready(NamedTuple):
    """A launch whose code is known."""

    runner: Callable[..., None]
    arguments: list[Any]
    addresses: list[tuple[int, int, int]]
    """Which argument is the address of which tensor, with what offset."""


def form(x: Tensor | None) -> Hashable:
    """Properties of a tensor that a plan may depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


class Plan:
    """Launches over the tensors of a call, over outputs and over scratch memory."""

    def __init__(self, device: torch.device, tensors: Tensors) -> None:
        self.device = device
        self.slots = [
            None if x is None else Slot(source, x.shape, x.stride(), x.dtype)
            for source, x in enumerate(tensors)
        ]
        self._launches: list[Launch] = []
        self._outputs: list[tuple[Sequence[int], torch.dtype]] = []
        self._scratch_bytes = 0
        self._ready: dict[tuple[bool, ...], list[Ready]] = {}

    def output(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Slot:
        """A new tensor, which `run` returns."""
        self._outputs.append((shape, dtype))
        return Slot(len(self.slots) + len(self._outputs) - 1, shape, (), dtype)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Slot:
        """Memory for the duration of the call."""
        place = Slot(_SCRATCH, shape, (), dtype, self._scratch_bytes)
        size = torch.Size(shape).numel() * dtype.itemsize
        self._scratch_bytes += -(-size // _ALIGNED) * _ALIGNED
        return place

    def launch(self, function: Any, programs: int, shrink: Shrink, /, *arguments: Any, **named: Any) -> None:
        """Add a launch. Compile-time constants and options go in by name, everything else by position."""
        self._launches.append(Launch(function, programs, arguments, named, shrink))

    def run(self, tensors: Tensors) -> list[Tensor]:
        """Launch everything with these tensors and return the outputs."""
        outputs = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._outputs]
        everything = [*tensors, *outputs]
        if self._scratch_bytes:
            everything.append(torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device))
        addresses = [0 if x is None else x.data_ptr() for x in everything]
        # Code is compiled for addresses divisible by 16, or for any; all else is part of the plan.
        aligned = tuple([not address & 15 for address in addresses])
        ready = self._ready.get(aligned)
        if ready is None:
            self._first(everything, aligned)
            return outputs
        for runner, arguments, places in ready:
            filled = arguments.copy()
            for place, source, offset in places:
                filled[place] = addresses[source] + offset
            runner(*filled)
        return outputs

    def _first(self, everything: Tensors, aligned: tuple[bool, ...]) -> None:
        """Launch through Triton's binder, and keep the compiled code."""
        ready = []
        for launch in self._launches:
            function, programs, arguments, named, shrink = launch
            values = [_tensor(x, everything) if isinstance(x, Slot) else x for x in arguments]
            try:
                compiled = function[(programs,)](*values, **named)
            except OutOfResources as error:
                raise _TooLarge(shrink) from error
            if DIRECT:
                ready.append(_bound(launch, compiled))
        if DIRECT:
            self._ready[aligned] = ready


def _tensor(place: Slot, everything: Tensors) -> Tensor:
    """The tensor of a slot in its dtype; in scratch memory, everything that follows too."""
    tensor = everything[place.source]
    if tensor is None:
        raise RuntimeError("a launch needs a tensor that the call does not have")
    return tensor[place.offset :].view(place.dtype) if place.source == _SCRATCH else tensor.view(place.dtype)


def _bound(launch: Launch, compiled: Any) -> Ready:
    function, programs, arguments, named, _ = launch
    constants = [named[name] for name in function.arg_names[len(arguments) :]]
    addresses = [(place, x.source, x.offset) for place, x in enumerate(arguments) if isinstance(x, Slot)]
    return Ready(compiled[programs, 1, 1], [*arguments, *constants], addresses)


class _TooLarge(Exception):
    """A launch needs more memory on the chip than the GPU has."""

    def __init__(self, shrink: Shrink) -> None:
        super().__init__()
        self.shrink = shrink


AnyPlan = TypeVar("AnyPlan", bound=Plan)
_plans: dict[Hashable, Any] = {}


def run(key: Hashable, make: Callable[[], AnyPlan], tensors: Tensors) -> tuple[AnyPlan, list[Tensor]]:
    """The plan of this key, made if necessary, and its outputs; with smaller tiles if the GPU needs them."""
    while True:
        plan = _plans.get(key)
        if plan is None:
            plan = make()
            if len(_plans) >= _MOST:
                _plans.clear()
            _plans[key] = plan
        try:
            return plan, plan.run(tensors)
        except _TooLarge as error:
            if error.shrink() is None:
                raise CannotRun("the GPU has too little shared memory for its kernels") from error


def forget() -> None:
    """Drop all plans, because configurations have changed."""
    _plans.clear()
