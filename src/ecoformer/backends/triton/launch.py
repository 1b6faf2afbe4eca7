"""Tensors to kernels: room for results, grids, and the order of the forward's launches."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from ecoformer.backends.fused import FusedCall, HashFunctions, empty_out
from ecoformer.backends.triton import causal, plans
from ecoformer.backends.triton import forward as ahead
from ecoformer.backends.triton import state as states
from ecoformer.backends.triton.configs import (
    Config,
    Sizes,
    Step,
    causal_config,
    choose,
    padded,
    reduce,
    sizes_of,
)
from ecoformer.backends.triton.plans import Place, Plan, Shrink, Tensors, form

HASH_PRECISION = "tf32x3"
"""How fp32 matrices are multiplied where codes hang on it: "tf32x3" (three products on tensor cores, about 22
bits) or "ieee" (plain fp32 arithmetic)."""
_CHEAP_TO_ADD = 16 << 20
"""Bytes of partial states that readers may load to add them up themselves: about the time of a launch."""


# Triton's own `cdiv` is made for kernels and takes ten microseconds outside.
def _ceiling(whole: int, part: int) -> int:
    return -(-whole // part)


def _code_dtype(bits: int) -> torch.dtype:
    return torch.int16 if bits <= 16 else torch.int32 if bits <= 32 else torch.int64


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _constants(samples: int, dim: int, channels: int, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes that kernels are compiled for: of those that read, and of those that hash too."""
    reading = {"E": channels, "BITS": bits, "BE": padded(channels), "BB": padded(bits)}
    return reading, {"D": dim, "M": samples, "BD": padded(dim), "BM": padded(samples), **reading}


def tensors_of(call: FusedCall) -> list[Tensor | None]:
    """The eight tensors of a call, hash functions contiguous."""
    if not isinstance(call.functions, HashFunctions):
        raise TypeError("the Triton kernels take kernelised hash functions only")
    return [call.q, call.k, call.v, call.mask, *(x.contiguous() for x in call.functions)]


def key_of(call: FusedCall) -> Hashable:
    """All that the launches of a call hang on, but the addresses of its tensors."""
    functions, constant = call.functions, call.constant
    tokens = (form(call.q), form(call.k), form(call.v), form(call.mask))
    shapes = functions[0].shape, functions.weight.shape
    return call.v.device, tokens, shapes, constant, call.causal, HASH_PRECISION


class Launches(Plan):
    """What all launches of one call share; tensors are places here."""

    def __init__(self, call: FusedCall, tensors: Tensors) -> None:
        super().__init__(call.v.device, tensors)
        _, self.k, _, mask, *self.functions = self.places[:8]
        self.q, v, support = (cast(Place, self.places[source]) for source in (0, 2, 4))
        self.v, self.support = v, support
        self.causal, self.beta = call.causal, call.constant
        self.heads, self.bits = v.shape[1], call.functions.weight.shape[-1]
        # A kernel that is compiled without mask never looks at this pointer.
        self.mask: list[Any] = [v, 0, 0]
        if mask is not None:
            mask.dtype = torch.uint8
            self.mask = [mask, *mask.strides]
        self.rows = v.shape[0] * v.shape[1]
        self.width = (self.bits + 1) * (v.shape[-1] + 1)
        self.exact = {"PIECES": 3 if v.dtype == torch.float32 else 2, "PRECISION": HASH_PRECISION}
        self.masked = {"MASKED": mask is not None}
        whole = self.beta.is_integer() and self.beta >= 0 and self.bits + self.beta <= 256
        self.whole = {"WHOLE": whole}
        _, samples, dim = support.shape
        self.reading, self.hashing = _constants(samples, dim, v.shape[-1], self.bits)

    def sizes(self, x: Place) -> Sizes:
        """Sizes with `x` as the tokens."""
        return sizes_of(x, self.v, self.support, self.bits)

    def config(self, step: Step, x: Place) -> Config:
        """The configuration of a step over the tokens `x`."""
        return choose(step, self.sizes(x))

    def stretches(self, config: Config, n: int) -> tuple[int, int]:
        """Into how many stretches a head's n tokens are cut, and their length."""
        blocks = _ceiling(n, config.block)
        wanted = max(1, _ceiling(_processors(self.device) * config.per_sm, self.rows))
        span = _ceiling(blocks, min(blocks, wanted)) * config.block
        return _ceiling(n, span), span

    def options(self, config: Config) -> dict[str, int]:
        """Block size and launch options."""
        return {"BLOCK": config.block, "num_warps": config.warps, "num_stages": config.stages}

    def smaller(self, step: Step, x: Place, config: Config) -> Shrink:
        """What to do where a GPU has no room for a step over the tokens `x`."""
        return partial(reduce, step, self.sizes(x), config)

    def state_room(self, *lead: int) -> Place:
        """Room for states."""
        return self.room((*lead, self.bits + 1, self.v.shape[-1] + 1))

    def add_parts(self, partial: Place, parts: int, out: Place, step: Step, x: Place) -> tuple[Place, int]:
        """Partial states and their number; added up in `out` where the next step would do it too often."""
        readers = self.stretches(self.config(step, x), x.shape[2])[0]
        if parts == 1 or self.rows * readers * parts * self.width * 4 <= _CHEAP_TO_ADD:
            return partial, parts
        programs = self.rows * _ceiling(self.width, 64)
        self.launch(
            states.add_parts, programs, nothing_smaller, partial, out, parts, self.width,
            ROWS=32, COLUMNS=64, num_warps=4,
        )  # fmt: skip
        return out, 1

    def running_sums(self, entries: Place, blocks: int, reverse: bool) -> None:
        """Running sums over blocks, in place."""
        programs = self.rows * _ceiling(self.width, 64)
        self.launch(
            states.running_sums, programs, nothing_smaller, entries, blocks, self.width,
            REVERSE=reverse, ROWS=64, COLUMNS=64, num_warps=4,
        )  # fmt: skip


def nothing_smaller() -> None:
    """A launch that has one configuration only."""


def _rooms(call: FusedCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what the backward wants: packed codes and states."""
    q, k, v, functions, bits = call.q, call.k, call.v, call.functions, call.bits
    state: tuple[int, ...] = (bits + 1, v.shape[-1] + 1)
    if call.causal:
        sizes = sizes_of(q, v, functions[0], bits)
        state = (_ceiling(q.shape[2], causal_config(sizes).block) + 1, *state)
    codes = [(tuple(x.shape[:3]), _code_dtype(bits)) for x in (q, k) if x is not None]
    return [*codes, ((*v.shape[:2], *state), torch.float32)]


def kept(call: FusedCall, /) -> list[Tensor]:
    """Room for what `forward` hands to the backward: packed codes and states."""
    return [torch.empty(shape, dtype=dtype, device=call.v.device) for shape, dtype in _rooms(call)]


def forward(call: FusedCall, /, *, keep: bool = True) -> tuple[Tensor, list[Tensor]]:
    """The output, and codes and states for the backward."""
    out = empty_out(call.q, call.v)
    tensors = [*tensors_of(call), out]
    with on(call.v.device):
        _, saved = plans.run((keep, key_of(call)), lambda: _Forward(call, tensors, keep), tensors)
    return out, saved


class _Forward(Launches):
    """The launches of one forward."""

    def __init__(self, call: FusedCall, tensors: Tensors, keep: bool) -> None:
        super().__init__(call, tensors)
        self.out = cast(Place, self.places[8])
        room = self.output if keep else self.room
        self.saved = [room(shape, dtype) for shape, dtype in _rooms(call)]
        if self.causal:
            self._causal(*self.saved)
        elif self.k is None and self.config("gather", self.q).per_sm == 0:
            self._attend(*self.saved)
        else:
            self._two_passes()

    def _attend(self, codes: Place, state: Place) -> None:
        q, v, out = self.q, self.v, self.out
        config = self.config("gather", q)
        self.launch(
            ahead.attend, self.rows, self.smaller("gather", q, config),
            q, *q.strides, v, *v.strides, *self.mask, codes, state, out, *out.strides,
            *self.functions, q.shape[2], self.heads, self.beta,
            **self.masked, **self.exact, **self.hashing, **self.options(config),
        )  # fmt: skip

    def _two_passes(self) -> None:
        q, out, saved = self.q, self.out, self.saved
        partial, parts = self._gather(q if self.k is None else self.k, saved[-2], saved[-1])
        step: Step = "read" if self.k is None else "gather"
        partial, parts = self.add_parts(partial, parts, saved[-1], step, q)
        config = self.config(step, q)
        stretches, span = self.stretches(config, q.shape[2])
        grid, options = (self.rows * stretches, self.smaller(step, q, config)), self.options(config)
        sizes = (q.shape[2], self.heads, parts, stretches, span, self.beta)
        if self.k is None:
            self.launch(
                ahead.read, *grid,
                saved[0], partial, saved[-1], out, *out.strides, *sizes,
                **self.exact, **self.reading, **options,
            )  # fmt: skip
        else:
            self.launch(
                ahead.hash_and_read, *grid,
                q, *q.strides, saved[0], partial, saved[-1], out, *out.strides, *self.functions, *sizes,
                **self.exact, **self.hashing, **options,
            )  # fmt: skip

    def _gather(self, x: Place, codes: Place, state: Place) -> tuple[Place, int]:
        """Codes of the keys, and partial states of every head, and how many of these."""
        config = self.config("gather", x)
        parts, span = self.stretches(config, x.shape[2])
        partial = state if parts == 1 else self.state_room(self.rows, parts)
        self.launch(
            ahead.gather, self.rows * parts, self.smaller("gather", x, config),
            x, *x.strides, self.v, *self.v.strides, *self.mask, codes, partial, *self.functions,
            x.shape[2], self.heads, parts, span,
            **self.masked, **self.exact, **self.hashing, **self.options(config),
        )  # fmt: skip
        return partial, parts

    def _causal(self, codes: Place, running: Place) -> None:
        q, v, out = self.q, self.v, self.out
        n, blocks, options = q.shape[2], running.shape[2] - 1, self.options(causal_config(self.sizes(q)))
        grid = (self.rows * blocks, nothing_smaller)
        self.launch(
            causal.causal_gather, *grid,
            q, *q.strides, v, *v.strides, *self.mask, codes, running, *self.functions,
            n, self.heads, blocks, **self.masked, **self.exact, **self.hashing, **options,
        )  # fmt: skip
        self.running_sums(running, blocks, False)
        self.launch(
            causal.causal_read, *grid,
            v, *v.strides, *self.mask, codes, running, out, *out.strides,
            n, self.heads, blocks, self.beta,
            **self.whole, **self.masked, **self.exact, **self.reading, **options,
        )  # fmt: skip
