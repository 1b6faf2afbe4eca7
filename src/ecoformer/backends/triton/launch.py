"""Tensors to kernels: room for results, grids, and the order of the forward's launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped, unused-ignore]

from ecoformer.backends.fused import Call, CannotRun, HashFunctions, empty_out
from ecoformer.backends.triton import causal
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

HASH_PRECISION = "tf32x3"
"""How fp32 matrices are multiplied where codes hang on it: "tf32x3" (three products on tensor cores, about 22
bits) or "ieee" (plain fp32 arithmetic)."""
_CHEAP_TO_ADD = 16 << 20
"""Bytes of partial states that readers may load to add them up themselves: about the time of a launch."""

Result = TypeVar("Result")


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
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=256)
def _constants(samples: int, dim: int, channels: int, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes that kernels are compiled for: of those that read, and of those that hash too."""
    reading = {"E": channels, "BITS": bits, "BE": padded(channels), "BB": padded(bits)}
    return reading, {"D": dim, "M": samples, "BD": padded(dim), "BM": padded(samples), **reading}


class Launches:
    """What all launches of one call share."""

    def __init__(self, call: Call) -> None:
        self.q, self.k, self.v, mask, functions, beta, self.causal, _ = call
        if not isinstance(functions, HashFunctions):
            raise TypeError("the Triton kernels take kernelised hash functions only")
        v, self.beta = call.v, float(beta)
        self.functions = [x.contiguous() for x in functions]
        self.device = v.device
        self.heads, self.bits = v.shape[1], functions.weight.shape[-1]
        self.support = functions.support
        # A kernel that is compiled without mask never looks at this pointer.
        self.mask: list[Any] = [v, 0, 0] if mask is None else [mask.view(torch.uint8), *mask.stride()]
        self.rows = v.shape[0] * v.shape[1]
        self.width = (self.bits + 1) * (v.shape[-1] + 1)
        self.exact = {"PIECES": 3 if v.dtype == torch.float32 else 2, "PRECISION": HASH_PRECISION}
        self.masked = {"MASKED": mask is not None}
        whole = self.beta.is_integer() and beta >= 0 and self.bits + beta <= 256
        self.whole = {"WHOLE": whole}
        self.reading, self.hashing = _constants(*self.support.shape[1:], v.shape[-1], self.bits)
        self._sizes = sizes_of(self.q, v, self.support, self.bits)

    def sizes(self, x: Tensor) -> Sizes:
        """Sizes with `x` as the tokens."""
        return self._sizes if x is self.q else sizes_of(x, self.v, self.support, self.bits)

    def config(self, step: Step, x: Tensor) -> Config:
        """The configuration of a step over the tokens `x`."""
        return choose(step, self.sizes(x), self.device)

    def stretches(self, config: Config, n: int) -> tuple[int, int]:
        """Into how many stretches a head's n tokens are cut, and their length."""
        blocks = _ceiling(n, config.block)
        wanted = max(1, _ceiling(_processors(self.device) * config.per_sm, self.rows))
        span = _ceiling(blocks, min(blocks, wanted)) * config.block
        return _ceiling(n, span), span

    def options(self, config: Config) -> dict[str, int]:
        """Block size and launch options."""
        return {"BLOCK": config.block, "num_warps": config.warps, "num_stages": config.stages}

    def fitting(self, step: Step, x: Tensor, launch: Callable[[Config], Result]) -> Result:
        """Launch with the step's configuration, or a smaller one if the GPU has no room for it."""
        config: Config | None = self.config(step, x)
        while config is not None:
            try:
                return launch(config)
            except OutOfResources:
                config = reduce(step, self.sizes(x), config)
        raise CannotRun("the GPU has too little shared memory for its kernels")

    def causal_options(self, x: Tensor) -> dict[str, int]:
        """Block size and launch options in causal order."""
        return self.options(causal_config(self.sizes(x)))

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An empty tensor on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def state_room(self, *lead: int) -> Tensor:
        """Room for states."""
        return self.room(*lead, self.bits + 1, self.v.shape[-1] + 1)

    def code_room(self, x: Tensor) -> Tensor:
        """Room for the codes of tokens."""
        return self.room(*x.shape[:3], dtype=_code_dtype(self.bits))

    def add_parts(
        self, partial: Tensor, parts: int, out: Tensor, step: Step, x: Tensor
    ) -> tuple[Tensor, int]:
        """Partial states and their number; added up in `out` where the next step would do it too often."""
        readers = self.stretches(self.config(step, x), x.shape[2])[0]
        if parts == 1 or self.rows * readers * parts * self.width * 4 <= _CHEAP_TO_ADD:
            return partial, parts
        grid = (self.rows * _ceiling(self.width, 64),)
        states.add_parts[grid](partial, out, parts, self.width, ROWS=32, COLUMNS=64, num_warps=4)
        return out, 1

    def running_sums(self, entries: Tensor, blocks: int, reverse: bool) -> None:
        """Running sums over blocks, in place."""
        grid = (self.rows * _ceiling(self.width, 64),)
        states.running_sums[grid](
            entries, blocks, self.width, REVERSE=reverse, ROWS=64, COLUMNS=64, num_warps=4
        )

    def room_for_backward(self) -> list[Tensor]:
        """Room for what the backward wants: packed codes and states."""
        lead = self.v.shape[:2]
        if self.causal:
            blocks = _ceiling(self.q.shape[2], causal_config(self.sizes(self.q)).block)
            return [self.code_room(self.q), self.state_room(*lead, blocks + 1)]
        codes = [self.code_room(x) for x in (self.q, self.k) if x is not None]
        return [*codes, self.state_room(*lead)]


def kept(call: Call, /) -> list[Tensor]:
    """Room for what `forward` hands to the backward: packed codes and states."""
    return Launches(call).room_for_backward()


def forward(call: Call, /) -> tuple[Tensor, list[Tensor]]:
    """The output, and codes and states for the backward."""
    launches = _Forward(call)
    with on(call.v.device):
        launches.run()
        return launches.out, launches.saved


class _Forward(Launches):
    """The launches of one forward."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.out, self.saved = empty_out(call.q, call.v), self.room_for_backward()

    def run(self) -> None:
        """Fill the output and what is kept."""
        if self.causal:
            self._causal(*self.saved)
        elif self.k is None and self.config("gather", self.q).per_sm == 0:
            self._attend(*self.saved)
        else:
            self._two_passes()

    def _attend(self, codes: Tensor, state: Tensor) -> None:
        q, v, out = self.q, self.v, self.out

        def launch(config: Config) -> None:
            ahead.attend[(self.rows,)](
                q, *q.stride(), v, *v.stride(), *self.mask, codes, state, out, *out.stride(),
                *self.functions, q.shape[2], self.heads, self.beta,
                **self.masked, **self.exact, **self.hashing, **self.options(config),
            )  # fmt: skip

        self.fitting("gather", q, launch)

    def _two_passes(self) -> None:
        q, out, saved = self.q, self.out, self.saved
        partial, parts = self._gather(q if self.k is None else self.k, saved[-2], saved[-1])
        step: Step = "read" if self.k is None else "gather"
        partial, parts = self.add_parts(partial, parts, saved[-1], step, q)

        def launch(config: Config) -> None:
            stretches, span = self.stretches(config, q.shape[2])
            grid = (self.rows * stretches,)
            sizes = (q.shape[2], self.heads, parts, stretches, span, self.beta)
            if self.k is None:
                ahead.read[grid](
                    saved[0], partial, saved[-1], out, *out.stride(), *sizes,
                    **self.exact, **self.reading, **self.options(config),
                )  # fmt: skip
            else:
                ahead.hash_and_read[grid](
                    q, *q.stride(), saved[0], partial, saved[-1], out, *out.stride(), *self.functions, *sizes,
                    **self.exact, **self.hashing, **self.options(config),
                )  # fmt: skip

        self.fitting(step, q, launch)

    def _gather(self, x: Tensor, codes: Tensor, state: Tensor) -> tuple[Tensor, int]:
        """Codes of the keys, and partial states of every head, and how many of these."""

        def launch(config: Config) -> tuple[Tensor, int]:
            parts, span = self.stretches(config, x.shape[2])
            partial = state if parts == 1 else self.state_room(self.rows, parts)
            ahead.gather[(self.rows * parts,)](
                x, *x.stride(), self.v, *self.v.stride(), *self.mask, codes, partial, *self.functions,
                x.shape[2], self.heads, parts, span,
                **self.masked, **self.exact, **self.hashing, **self.options(config),
            )  # fmt: skip
            return partial, parts

        return self.fitting("gather", x, launch)

    def _causal(self, codes: Tensor, running: Tensor) -> None:
        q, v, out = self.q, self.v, self.out
        n, blocks, options = q.shape[2], running.shape[2] - 1, self.causal_options(q)
        grid = (self.rows * blocks,)
        causal.causal_gather[grid](
            q, *q.stride(), v, *v.stride(), *self.mask, codes, running, *self.functions,
            n, self.heads, blocks, **self.masked, **self.exact, **self.hashing, **options,
        )  # fmt: skip
        self.running_sums(running, blocks, False)
        causal.causal_read[grid](
            v, *v.stride(), *self.mask, codes, running, out, *out.stride(),
            n, self.heads, blocks, self.beta,
            **self.whole, **self.masked, **self.exact, **self.reading, **options,
        )  # fmt: skip
