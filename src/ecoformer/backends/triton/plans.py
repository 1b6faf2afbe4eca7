"""A call's launches, worked out once for its shapes and repeated with the addresses of other tensors.

Room, grids and configurations take Python longer to work out than many kernels run, and so does Triton's
binder, which looks at every argument of every launch to find the code that was compiled for it.
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
"""Whether launches are repeated by compiled code; the interpreter has none."""
_ALIGNED = 256
"""Bytes that divide every place in the scratch memory."""
_MOST = 1024
"""Plans that are kept: lengths that never come back must not fill the memory."""
_SCRATCH = -1

Tensors = Sequence[Tensor | None]
Shrink = Callable[[], object]
"""Takes a smaller configuration from now on; gives None where there is none."""


class Place:
    """Stands for a tensor in a plan: which one it will be, and its form."""

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
    """What a plan may depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


class Plan:
    """Launches over the tensors of a call, over outputs and over scratch memory."""

    def __init__(self, device: torch.device, tensors: Tensors) -> None:
        self.device = device
        self.places = [
            None if x is None else Place(source, x.shape, x.stride(), x.dtype)
            for source, x in enumerate(tensors)
        ]
        self._launches: list[Launch] = []
        self._outputs: list[tuple[Sequence[int], torch.dtype]] = []
        self._scratch = 0
        self._ready: dict[tuple[bool, ...], list[Ready]] = {}

    def output(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Place:
        """A new tensor, which `run` hands out."""
        self._outputs.append((shape, dtype))
        return Place(len(self.places) + len(self._outputs) - 1, shape, (), dtype)

    def room(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Place:
        """Memory for the time of the call."""
        place = Place(_SCRATCH, shape, (), dtype, self._scratch)
        size = torch.Size(shape).numel() * dtype.itemsize
        self._scratch += -(-size // _ALIGNED) * _ALIGNED
        return place

    def launch(self, function: Any, programs: int, shrink: Shrink, /, *arguments: Any, **named: Any) -> None:
        """Add a launch. Compile-time constants and options go in by name, everything else by position."""
        self._launches.append(Launch(function, programs, arguments, named, shrink))

    def run(self, tensors: Tensors) -> list[Tensor]:
        """Launch everything over these tensors, and hand out the outputs."""
        outputs = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._outputs]
        everything = [*tensors, *outputs]
        if self._scratch:
            everything.append(torch.empty(self._scratch, dtype=torch.uint8, device=self.device))
        addresses = [0 if x is None else x.data_ptr() for x in everything]
        # Code is compiled for addresses that 16 divides, or for any; all else is the plan's.
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
        """Launch by Triton's own way, and keep the code that it found."""
        ready = []
        for launch in self._launches:
            function, programs, arguments, named, shrink = launch
            values = [_tensor(x, everything) if isinstance(x, Place) else x for x in arguments]
            try:
                compiled = function[(programs,)](*values, **named)
            except OutOfResources as error:
                raise _NoRoom(shrink) from error
            if DIRECT:
                ready.append(_bound(launch, compiled))
        if DIRECT:
            self._ready[aligned] = ready


def _tensor(place: Place, everything: Tensors) -> Tensor:
    """What a place stands for, of its dtype; in scratch memory everything that follows too."""
    tensor = everything[place.source]
    if tensor is None:
        raise RuntimeError("a launch needs a tensor that the call has not got")
    return tensor[place.offset :].view(place.dtype) if place.source == _SCRATCH else tensor.view(place.dtype)


def _bound(launch: Launch, compiled: Any) -> Ready:
    function, programs, arguments, named, _ = launch
    constants = [named[name] for name in function.arg_names[len(arguments) :]]
    addresses = [(place, x.source, x.offset) for place, x in enumerate(arguments) if isinstance(x, Place)]
    return Ready(compiled[programs, 1, 1], [*arguments, *constants], addresses)


class _NoRoom(Exception):
    """A GPU has too little memory on its chip for a launch."""

    def __init__(self, shrink: Shrink) -> None:
        super().__init__()
        self.shrink = shrink


AnyPlan = TypeVar("AnyPlan", bound=Plan)
_plans: dict[Hashable, Any] = {}


def run(key: Hashable, make: Callable[[], AnyPlan], tensors: Tensors) -> tuple[AnyPlan, list[Tensor]]:
    """The plan of this key, made if need be, and what it gives; with smaller tiles where a GPU needs them."""
    while True:
        plan = _plans.get(key)
        if plan is None:
            plan = make()
            if len(_plans) >= _MOST:
                _plans.clear()
            _plans[key] = plan
        try:
            return plan, plan.run(tensors)
        except _NoRoom as error:
            if error.shrink() is None:
                raise CannotRun("the GPU has too little shared memory for its kernels") from error


def forget() -> None:
    """Drop all plans: how kernels are launched has changed."""
    _plans.clear()
