"""From tensors to kernels: memory, grids, and the order of the forward's launches."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ecoformer.backends.fused import TENSORS, FusedCall, empty_out
from ecoformer.backends.hashing import Signs, shapes
from ecoformer.backends.triton import causal, groups, plans
from ecoformer.backends.triton import forward as kernels
from ecoformer.backends.triton import state as states
from ecoformer.backends.triton.configs import Config, Sizes, Step, causal_config, choose, padded, reduce
from ecoformer.backends.triton.hashing import KERNEL, PLANES, SIGNS
from ecoformer.backends.triton.plans import Plan, Shrink, Slot, Tensors, form

HASH_PRECISION = "tf32x3"
"""How fp32 matrices are multiplied where codes depend on it: "tf32x3" (three products on tensor cores, about
22 bits) or "ieee" (plain fp32 arithmetic)."""
_FEW = 64
"""Heads with fewer than this take more programs to mix."""
_CHEAP_TO_ADD = 16 << 20
"""Bytes of partial states that readers may add up themselves: they take about as long as a launch."""


def ceiling(whole: int, part: int) -> int:
    """Quotient, rounded up. Triton's own `cdiv` is made for kernels and takes ten microseconds outside."""
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


def tensors_of(call: FusedCall) -> list[Tensor | None]:
    """All tensors of a call, those of hash functions and affinity contiguous."""
    tensors = call.flat()[:TENSORS]
    return [*tensors[:5], *(None if x is None else x.contiguous() for x in tensors[5:])]


def key_of(call: FusedCall) -> Hashable:
    """All that the launches of a call depend on except the addresses of its tensors."""
    tokens = tuple([form(x) for x in (call.q, call.k, call.v, call.mask, call.key_weight)])
    sizes = shapes(call.functions), shapes(call.key_functions), call.groups, call.scale is None
    return call.v.device, tokens, sizes, call.constant, call.causal, HASH_PRECISION


class Hashing(NamedTuple):
    """Hash functions in a plan."""

    tensors: list[Slot]
    """Support, mean, sigma and weight. Kernels for hyperplanes read the last one, those for signs none."""
    constants: dict[str, int]
    """Sizes that kernels are compiled for."""

    @classmethod
    def of(cls, places: list[Slot | None], q: Slot) -> Hashing:
        """Of four places; without a weight, the signs of q."""
        support, _, _, weight = places
        dim = bits = samples = q.shape[3]
        kind = SIGNS
        if weight is not None:
            kind = PLANES if support is None else KERNEL
            _, samples, bits = weight.shape
        sizes = {"D": dim, "M": samples, "BITS": bits}
        wide = {"BD": padded(dim), "BM": padded(samples), "BB": padded(bits)}
        return cls([x or weight or q for x in places], {"HASH": kind.value, **sizes, **wide})


class Launches(Plan):
    """What all launches of one call share; tensors are places here."""

    def __init__(self, call: FusedCall, tensors: Tensors) -> None:
        super().__init__(call.v.device, tensors)
        self.q, v = (cast(Slot, self.slots[source]) for source in (0, 2))
        self.v, self.shared, self.stored = v, call.shared_codes, _stored(call)
        self.k = self.q if self.slots[1] is None else self.slots[1]
        self.functions = self.key_functions = Hashing.of(self.slots[5:9], self.q)
        if call.key_functions is not None:
            self.key_functions = Hashing.of(self.slots[9:13], self.q)
        self.causal, self.beta = call.causal, call.constant
        self.heads, self.bits = v.shape[1], call.bits
        # Kernels compiled without mask, weights or groups ignore these pointers.
        self.mask: list[Any] = [v, 0, 0]
        if (mask := self.slots[3]) is not None:
            mask.dtype = torch.uint8
            self.mask = [mask, *mask.strides]
        self.key_weight: list[Any] = [v, 0, 0, 0]
        if (key_weight := self.slots[4]) is not None:
            self.key_weight = [key_weight, *key_weight.strides]
        self.levels = [x or v for x in self.slots[13:16]]
        self.rows = v.shape[0] * v.shape[1]
        self.width = _state_width(call)
        self.exact = {"PIECES": _pieces(call), "PRECISION": HASH_PRECISION}
        self.weighted = {"WEIGHTED": key_weight is not None}
        self.masked = {"MASKED": mask is not None, **self.weighted}
        whole = self.beta.is_integer() and self.beta >= 0 and self.bits + self.beta <= 256
        self.whole = {"WHOLE": whole}
        self._sizes, self.grouped = sizes_of(call), call.scale is not None
        size, features, channels = call.group, _features(call), v.shape[-1]
        shape = {"E": channels, "F": features, "BE": padded(channels), "BF": padded(features)}
        self.reading = {"SIZE": size, "BITS": self.bits, "BB": padded(self.bits), **shape}

    def split(self, saved: list[Slot]) -> tuple[list[Slot], Slot, Slot]:
        """Codes of queries and of keys, state and table, of what is kept for the backward.

        Kernels do not read codes that are not stored, nor a table without groups of bits.
        """
        state = saved[2 - self.shared if self.stored else 0]
        codes = saved[: 2 - self.shared] if self.stored else [self.q]
        return codes, state, saved[-1]

    def hashing(self, functions: Hashing) -> dict[str, int]:
        """Constants of a kernel that hashes by these functions."""
        return {**functions.constants, **self.reading}

    def sizes(self, x: Slot) -> Sizes:
        """Sizes with `x` as the tokens."""
        return self._sizes._replace(tokens=x.shape[2])

    def config(self, step: Step, x: Slot) -> Config:
        """The configuration of a step over the tokens `x`."""
        return choose(step, self.sizes(x))

    def stretches(self, config: Config, n: int) -> tuple[int, int]:
        """Number and length of the stretches that a head's n tokens are cut into."""
        blocks = ceiling(n, config.block)
        wanted = max(1, ceiling(_processors(self.device) * config.per_sm, self.rows))
        span = ceiling(blocks, min(blocks, wanted)) * config.block
        return ceiling(n, span), span

    def options(self, config: Config) -> dict[str, int]:
        """Block size and launch options."""
        return {"BLOCK": config.block, "num_warps": config.warps, "num_stages": config.stages}

    def tall(self, config: Config) -> dict[str, int]:
        """The same for kernels that sum over tokens."""
        return {"WIDE": config.warps >= 4, **self.options(config)}

    def in_order(self, light: bool = False) -> dict[str, int]:
        """The same for kernels in causal order; `light`: with few registers."""
        config = causal_config(self._sizes, light)
        return {"STRIDE": config.stride, **self.tall(config)}

    def smaller(self, step: Step, x: Slot, config: Config) -> Shrink:
        """What to do if a step over the tokens `x` needs too much memory on the chip."""
        return partial(reduce, step, self.sizes(x), config)

    def state_memory(self, *lead: int) -> Slot:
        """Scratch memory for states."""
        return self.scratch((*lead, self.width))

    def add_parts(self, partial: Slot, parts: int, out: Slot, step: Step, x: Slot) -> tuple[Slot, int]:
        """Partial states and their number; added up in `out` where the next step would do it too often."""
        readers = self.stretches(self.config(step, x), x.shape[2])[0]
        if parts == 1 or self.rows * readers * parts * self.width * 4 <= _CHEAP_TO_ADD:
            return partial, parts
        programs = self.rows * ceiling(self.width, 64)
        self.launch(
            states.add_parts, programs, nothing_smaller, partial, out, parts, self.width,
            ROWS=32, COLUMNS=64, num_warps=4,
        )  # fmt: skip
        return out, 1

    def mix_parts(
        self,
        partial: Slot,
        parts: int,
        table: Slot,
        keep: Slot | None = None,
        walsh: tuple[Slot, Slot, Slot] | None = None,
        to_levels: Slot | None = None,
    ) -> None:
        """Add up partial states, in `keep` if given, and mix the sum; see the kernel.

        `walsh` are coefficients of the sum, another state, and its coefficients.
        """
        size, features, channels = (self.reading[name] for name in ("SIZE", "F", "E"))
        rows, columns = max(16, 1 << size), self.mixed_columns()
        programs = self.rows * ceiling(features, rows) * ceiling(channels, columns)
        places = (partial, keep or table, table, *(walsh or (table, table, table)), to_levels or table)
        flags = {"KEEP": keep is not None, "WALSHED": walsh is not None, "LEVELS": to_levels is not None}
        sizes = {"SIZE": size, "E": channels, "F": features, "BS": rows, "COLUMNS": columns}
        together = 1 if parts == 1 else 4 if parts <= 16 else 16
        self.launch(
            groups.mix_parts, programs, nothing_smaller, *places, *self.levels[:2], self.heads, parts,
            **flags, **sizes, PARTS=together, num_warps=1 if together * rows * columns <= 512 else 4,
        )  # fmt: skip

    def mixed_columns(self) -> int:
        """Columns that one program of `mix_parts` handles."""
        return 16 if self.reading["SIZE"] > 4 or self.rows < _FEW else min(64, self.reading["BE"])

    def running_sums(self, entries: Slot, blocks: int, reverse: bool) -> None:
        """Running sums over blocks, in place."""
        # Few variants, because each is compiled.
        rows = next(rows for rows in (2, 8, 16, 64) if rows > blocks or rows == 64)
        columns = max(64, 2048 // rows)
        self.launch(
            states.running_sums, self.rows * ceiling(self.width, columns), nothing_smaller,
            entries, blocks, self.width, REVERSE=reverse, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


def nothing_smaller() -> None:
    """A launch that has one configuration only."""


def _features(call: FusedCall) -> int:
    return call.groups << call.group


def sizes_of(call: FusedCall) -> Sizes:
    """What configurations depend on."""
    batch, heads, tokens, dim = call.q.shape
    samples = 0 if isinstance(call.functions, Signs) else call.functions.weight.shape[1]
    features = 0 if call.scale is None else _features(call)
    return Sizes(batch * heads, tokens, dim, call.v.shape[3], samples, call.bits, call.v.dtype, features)


def _stored(call: FusedCall) -> bool:
    """Whether codes are stored. Signs of projections are as quickly found again, but not packed."""
    return not isinstance(call.functions, Signs) or call.causal


def _state_width(call: FusedCall) -> int:
    return states.state_numbers(call.scale is not None, _features(call), call.v.shape[-1])


def _pieces(call: FusedCall) -> int:
    """Into how many bf16 numbers fp32 numbers are split.

    With groups of bits one suffices for results in bf16: tables are rounded as the output is.
    """
    if call.v.dtype == torch.float32:
        return 3
    return 1 if call.scale is not None and call.v.dtype == torch.bfloat16 else 2


def _saved_shapes(call: FusedCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what the backward needs: packed codes and states."""
    q, v = call.q, call.v
    state: tuple[int, ...] = (_state_width(call),)
    if call.causal:
        config = causal_config(sizes_of(call))
        state = (ceiling(q.shape[2], config.block * config.stride) + 1, *state)
    tokens = [q] if call.shared_codes else [q, q if call.k is None else call.k]
    if not _stored(call):
        tokens = []
    codes = [(tuple(x.shape[:3]), _code_dtype(call.bits)) for x in tokens]
    states = [((*v.shape[:2], *state), torch.float32)]
    return [*codes, *(states if call.scale is None or call.causal else 2 * states)]


def kept(call: FusedCall, /) -> list[Tensor]:
    """Memory for what `forward` hands to the backward: packed codes and states."""
    return [torch.empty(shape, dtype=dtype, device=call.v.device) for shape, dtype in _saved_shapes(call)]


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
        self.out = cast(Slot, self.slots[TENSORS])
        memory = self.output if keep else self.scratch
        self.saved = [memory(shape, dtype) for shape, dtype in _saved_shapes(call)]
        self.codes, self.state, self.table = self.split(self.saved)
        if self.causal:
            self._causal()
        elif self.shared and self.stored and self.config("gather", self.q).per_sm == 0:
            self._attend()
        else:
            self._two_passes()

    def _keys(self, x: Slot) -> list[Any]:
        """Tokens that are keys, and what belongs to them."""
        return [x, *x.strides, self.v, *self.v.strides, *self.mask, *self.key_weight]

    def _attend(self) -> None:
        q, out = self.q, self.out
        config = self.config("gather", q)
        self.launch(
            kernels.attend, self.rows, self.smaller("gather", q, config),
            *self._keys(q), self.codes[0], self.state, self.table, out, *out.strides,
            *self.functions.tensors, *self.levels, q.shape[2], self.heads, self.beta,
            **self.masked, **self.exact, **self.hashing(self.functions), **self.tall(config),
        )  # fmt: skip

    def _two_passes(self) -> None:
        q, out, state = self.q, self.out, self.state
        config = self.config("gather", self.k)
        parts, span = self.stretches(config, self.k.shape[2])
        partial = state if parts == 1 else self.state_memory(self.rows, parts)
        self._gather(parts, span, partial, self.smaller("gather", self.k, config), self.tall(config))
        hashed = not (self.shared and self.stored)
        step: Step = "gather" if hashed and self.stored else "read"
        if self.grouped:
            self.mix_parts(partial, parts, self.table, keep=state if parts > 1 else None)
            partial, parts = self.table, 1
        else:
            partial, parts = self.add_parts(partial, parts, state, step, q)
        config = self.config(step, q)
        stretches, span = self.stretches(config, q.shape[2])
        self.launch(
            kernels.read, self.rows * stretches, self.smaller(step, q, config),
            q, *q.strides, self.codes[0], partial, state, out, *out.strides, *self.functions.tensors,
            self.levels[2], q.shape[2], self.heads, parts, stretches, span, self.beta,
            HASHED=hashed, **self.exact, **self.hashing(self.functions), **self.options(config),
        )  # fmt: skip

    def _gather(self, parts: int, span: int, partial: Slot, smaller: Shrink, options: dict[str, int]) -> None:
        """Codes of the keys, and states of so many parts of every head."""
        x = self.k
        self.launch(
            kernels.gather, self.rows * parts, smaller,
            *self._keys(x), self.codes[-1], partial, *self.key_functions.tensors,
            x.shape[2], self.heads, parts, span, CODES=self.stored, CAUSAL=self.causal,
            **self.masked, **self.exact, **self.hashing(self.key_functions), **options,
        )  # fmt: skip

    def _causal(self) -> None:
        q, out, running = self.q, self.out, self.state
        codes, key_codes = self.codes[0], self.codes[-1]
        stretches, config = running.shape[2] - 1, causal_config(self._sizes)
        self._gather(stretches, config.block * config.stride, running, nothing_smaller, self.tall(config))
        self.running_sums(running, stretches, False)
        self.launch(
            causal.causal_read, self.rows * stretches, nothing_smaller,
            *self._keys(q), codes, key_codes, running, out, *out.strides,
            *self.functions.tensors, *self.levels, q.shape[2], self.heads, stretches, self.beta,
            SHARED=self.shared, **self.whole, **self.masked, **self.exact,
            **self.hashing(self.functions), **self.in_order(light=not self.weighted["WEIGHTED"]),
        )  # fmt: skip
