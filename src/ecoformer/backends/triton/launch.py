"""Tensors to kernels: room for results, grids, and the order of launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped, unused-ignore]

from ecoformer.backends.fused import CannotRun, Functions, HashFunctions, empty_out
from ecoformer.backends.triton import backward as back
from ecoformer.backends.triton import causal as ordered
from ecoformer.backends.triton import forward as ahead
from ecoformer.backends.triton import state as states
from ecoformer.backends.triton.configs import Config, Sizes, Step, causal_config, choose, reduce, sizes_of

HASH_PRECISION = "tf32x3"
"""How fp32 matrices are multiplied where codes hang on it: "tf32x3" (three products on tensor cores, about 22
bits) or "ieee" (plain fp32 arithmetic)."""
_CHEAP_TO_ADD = 16 << 20
"""Bytes of partial states that readers may load to add them up themselves: about the time of a launch."""

Result = TypeVar("Result")
Needs = tuple[bool, bool, bool, bool]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


# Triton's own functions of these names are made for kernels and take ten microseconds outside.
def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _ceiling(whole: int, part: int) -> int:
    return -(-whole // part)


def _code_dtype(bits: int) -> torch.dtype:
    return torch.int16 if bits <= 16 else torch.int32 if bits <= 32 else torch.int64


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Call:
    """What all launches of one call share."""

    def __init__(self, v: Tensor, mask: Tensor | None, functions: Functions, beta: float) -> None:
        if not isinstance(functions, HashFunctions):
            raise TypeError("the Triton kernels take kernelised hash functions only")
        self.functions = [x.contiguous() for x in functions]
        self.v, self.beta, self.device = v, beta, v.device
        self.heads, self.bits = v.shape[1], functions.weight.shape[-1]
        self.support = functions.support
        # A kernel that is compiled without mask never looks at this pointer.
        self.mask: list[Any] = [v, 0, 0] if mask is None else [mask.view(torch.uint8), *mask.stride()]
        self.rows = v.shape[0] * v.shape[1]
        self.width = (self.bits + 1) * (v.shape[-1] + 1)
        self.exact = {"PIECES": 3 if v.dtype == torch.float32 else 2, "PRECISION": HASH_PRECISION}
        self.masked = {"MASKED": mask is not None}
        whole = float(beta).is_integer() and beta >= 0 and self.bits + beta <= 256
        self.whole = {"WHOLE": whole}
        self.reading = {
            "E": v.shape[-1], "BITS": self.bits, "BE": _padded(v.shape[-1]), "BB": _padded(self.bits)
        }  # fmt: skip
        dim, samples = functions.support.shape[2], functions.support.shape[1]
        self.hashing = {
            "D": dim, "M": samples, "BD": _padded(dim), "BM": _padded(samples), **self.reading
        }  # fmt: skip

    def sizes(self, x: Tensor) -> Sizes:
        """Sizes with `x` as the tokens."""
        return sizes_of(x, self.v, self.support, self.bits)

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
        return self.options(causal_config(self.sizes(x), self.device))

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


def kept(
    q: Tensor, k: Tensor | None, v: Tensor, mask: Tensor | None, functions: Functions, causal: bool, /
) -> list[Tensor]:
    """Room for what `forward` hands to the backward: packed codes and states."""
    return _room_for_backward(Call(v, mask, functions, 0.0), q, k, causal)


def _room_for_backward(call: Call, q: Tensor, k: Tensor | None, causal: bool) -> list[Tensor]:
    v = call.v
    if causal:
        blocks = _ceiling(q.shape[2], causal_config(call.sizes(q), v.device).block)
        return [call.code_room(q), call.state_room(*v.shape[:2], blocks + 1)]
    codes = [call.code_room(x) for x in (q, k) if x is not None]
    return [*codes, call.state_room(*v.shape[:2])]


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
    /,
) -> tuple[Tensor, list[Tensor]]:
    """The output, and codes and states for the backward."""
    call = Call(v, mask, functions, beta)
    out, saved = empty_out(q, v), _room_for_backward(call, q, k, causal)
    with _on(v.device):
        if causal:
            _causal_forward(call, q, out, *saved)
        elif k is None and call.config("gather", q).per_sm == 0:
            _attend(call, q, out, *saved)
        else:
            _two_passes(call, q, k, out, saved)
    return out, saved


def _attend(call: Call, q: Tensor, out: Tensor, codes: Tensor, state: Tensor) -> None:
    def launch(config: Config) -> None:
        ahead.attend[(call.rows,)](
            q, *q.stride(), call.v, *call.v.stride(), *call.mask, codes, state, out, *out.stride(),
            *call.functions, q.shape[2], call.heads, call.beta,
            **call.masked, **call.exact, **call.hashing, **call.options(config),
        )  # fmt: skip

    call.fitting("gather", q, launch)


def _two_passes(call: Call, q: Tensor, k: Tensor | None, out: Tensor, saved: list[Tensor]) -> None:
    partial, parts = _gather(call, q if k is None else k, saved[-2], saved[-1])
    partial, parts = call.add_parts(partial, parts, saved[-1], "read", q)

    def launch(config: Config) -> None:
        stretches, span = call.stretches(config, q.shape[2])
        grid = (call.rows * stretches,)
        sizes = (q.shape[2], call.heads, parts, stretches, span, call.beta)
        if k is None:
            ahead.read[grid](
                saved[0], partial, saved[-1], out, *out.stride(), *sizes,
                **call.exact, **call.reading, **call.options(config),
            )  # fmt: skip
        else:
            ahead.hash_and_read[grid](
                q, *q.stride(), saved[0], partial, saved[-1], out, *out.stride(), *call.functions, *sizes,
                **call.exact, **call.hashing, **call.options(config),
            )  # fmt: skip

    call.fitting("read", q, launch)


def _gather(call: Call, x: Tensor, codes: Tensor, state: Tensor) -> tuple[Tensor, int]:
    """Codes of the keys, and partial states of every head, and how many of these."""

    def launch(config: Config) -> tuple[Tensor, int]:
        parts, span = call.stretches(config, x.shape[2])
        partial = state if parts == 1 else call.state_room(call.rows, parts)
        ahead.gather[(call.rows * parts,)](
            x, *x.stride(), call.v, *call.v.stride(), *call.mask, codes, partial, *call.functions,
            x.shape[2], call.heads, parts, span,
            **call.masked, **call.exact, **call.hashing, **call.options(config),
        )  # fmt: skip
        return partial, parts

    return call.fitting("gather", x, launch)


def _causal_forward(call: Call, q: Tensor, out: Tensor, codes: Tensor, running: Tensor) -> None:
    n, blocks, options = q.shape[2], running.shape[2] - 1, call.causal_options(q)
    grid = (call.rows * blocks,)
    ordered.causal_gather[grid](
        q, *q.stride(), call.v, *call.v.stride(), *call.mask, codes, running, *call.functions,
        n, call.heads, blocks, **call.masked, **call.exact, **call.hashing, **options,
    )  # fmt: skip
    call.running_sums(running, blocks, False)
    ordered.causal_read[grid](
        call.v, *call.v.stride(), *call.mask, codes, running, out, *out.stride(),
        n, call.heads, blocks, call.beta,
        **call.whole, **call.masked, **call.exact, **call.reading, **options,
    )  # fmt: skip


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mask: Tensor | None,
    functions: Functions,
    beta: float,
    causal: bool,
    saved: list[Tensor],
    needs: Needs,
    /,
) -> Grads:
    """Gradients of q, k, v and the weight; None where not needed."""
    back_call = _Back(grad, v, mask, functions, beta, saved, needs)
    with _on(v.device):
        if causal:
            return back_call.causal(q)
        return back_call.shared(q) if k is None else back_call.cross(q, k)


class _Back(Call):
    """The launches of one backward."""

    def __init__(
        self,
        grad: Tensor,
        v: Tensor,
        mask: Tensor | None,
        functions: Functions,
        beta: float,
        saved: list[Tensor],
        needs: Needs,
    ) -> None:
        super().__init__(v, mask, functions, beta)
        self.grad, self.saved, self.needs = grad, saved, needs
        self.to_v = torch.empty(v.shape, dtype=v.dtype, device=v.device) if needs[2] else None

    def shared(self, q: Tensor) -> Grads:
        """Queries are the keys."""
        codes, state = self.saved
        if self.config("gather_grad", q).per_sm == 0:
            to_q, to_weight = self._attend_back(q)
        else:
            to_state = self._gather_grad(q, codes, state, q)
            to_q, to_weight = self._token_grad(q, codes, *to_state, True, True)
        return to_q if self.needs[0] else None, None, self.to_v, to_weight

    def cross(self, q: Tensor, k: Tensor) -> Grads:
        """Keys of their own."""
        codes_q, codes_k, state = self.saved
        to_q = to_k = None
        weights = []
        if any(self.needs[1:]):
            to_state = self._gather_grad(q, codes_q, state, k)
            to_k, to_weight = self._token_grad(k, codes_k, *to_state, False, True)
            weights.append(to_weight)
        if self.needs[0] or self.needs[3]:
            to_q, to_weight = self._token_grad(q, codes_q, state, 1, True, False)
            weights.append(to_weight)
        to_weight = weights[0] + weights[1] if self.needs[3] else None  # type: ignore[operator]
        return to_q if self.needs[0] else None, to_k if self.needs[1] else None, self.to_v, to_weight

    def causal(self, q: Tensor) -> Grads:
        """In causal order, where queries are the keys."""
        codes, running = self.saved
        n, blocks, options = q.shape[2], running.shape[2] - 1, self.causal_options(q)
        grid, sizes = (self.rows * blocks,), (n, self.heads, blocks, self.beta)
        partial, reads = torch.empty_like(running), self.room(self.rows, n, 2)
        ordered.causal_gather_grad[grid](
            self.grad, *self.grad.stride(), self.v, *self.v.stride(), *self.mask, codes, running, partial,
            reads, *sizes, **self.whole, **self.masked, **self.exact, **self.reading, **options,
        )  # fmt: skip
        self.running_sums(partial, blocks, True)
        to_q, weights, flags = self._room_for(q, blocks, values=True)
        ordered.causal_token_grad[grid](
            *self._inputs(q), codes, running, partial, reads, *self._outputs(to_q, weights),
            *self.functions, *sizes, **flags, **self.masked, **self._precisions(q), **self.hashing, **options,
        )  # fmt: skip
        return to_q if self.needs[0] else None, None, self.to_v, self._weight(weights)

    def _gather_grad(self, q: Tensor, codes: Tensor, state: Tensor, keys: Tensor) -> tuple[Tensor, int]:
        """Partial gradients of the state for the keys' gradients, and how many there are."""

        def launch(config: Config) -> tuple[Tensor, int]:
            parts, span = self.stretches(config, q.shape[2])
            partial = self.state_room(self.rows, parts)
            back.gather_grad[(self.rows * parts,)](
                self.grad, *self.grad.stride(), codes, state, partial,
                q.shape[2], self.heads, parts, span, self.beta,
                **self.exact, **self.reading, **self.options(config),
            )  # fmt: skip
            return partial, parts

        partial, parts = self.fitting("gather_grad", q, launch)
        return self.add_parts(partial, parts, torch.empty_like(state), "token_grad", keys)

    def _token_grad(
        self, x: Tensor, codes: Tensor, to_state: Tensor, grad_parts: int, queries: bool, keys: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        def launch(config: Config) -> tuple[Tensor | None, Tensor | None]:
            parts, span = self.stretches(config, x.shape[2])
            to_x, weights, flags = self._room_for(x, parts, values=keys)
            back.token_grad[(self.rows * parts,)](
                *self._inputs(x), codes, self.saved[-1], to_state, *self._outputs(to_x, weights),
                *self.functions, x.shape[2], self.heads, grad_parts, parts, span, self.beta,
                SINGLE=span == config.block, QUERIES=queries, KEYS=keys, **flags,
                **self.masked, **self._precisions(x), **self.hashing,
                **self.options(config),
            )  # fmt: skip
            return to_x, self._weight(weights)

        return self.fitting("token_grad", x, launch)

    def _attend_back(self, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
        to_q, weights, flags = self._room_for(q, 1, values=True)

        def launch(config: Config) -> None:
            back.attend_back[(self.rows,)](
                *self._inputs(q), *self.saved, *self._outputs(to_q, weights), *self.functions,
                q.shape[2], self.heads, self.beta,
                **flags, **self.masked, **self._precisions(q), **self.hashing, **self.options(config),
            )  # fmt: skip

        self.fitting("gather_grad", q, launch)
        return to_q, self._weight(weights)

    def _inputs(self, x: Tensor) -> list[Any]:
        return [self.grad, *self.grad.stride(), x, *x.stride(), self.v, *self.v.stride(), *self.mask]

    def _room_for(
        self, x: Tensor, parts: int, values: bool
    ) -> tuple[Tensor | None, Tensor | None, dict[str, bool]]:
        """Room for gradients of tokens and weight, and what is to be computed."""
        is_query, is_key = self.needs[0], self.needs[1]
        tokens = self.needs[3] or (is_query if self._shared or not values else is_key)
        to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if tokens else None
        weights = None
        if self.needs[3]:
            weights = self.room(self.rows, parts, self.support.shape[1], self.bits)
        flags = {"TOKENS": tokens, "VALUES": values and self.needs[2], "WEIGHT": self.needs[3]}
        return to_x, weights, flags

    @property
    def _shared(self) -> bool:
        return len(self.saved) == 2

    def _outputs(self, to_x: Tensor | None, weights: Tensor | None) -> list[Tensor]:
        # A kernel never looks at the pointers of what it is not asked for.
        return [self.v if x is None else x for x in (to_x, self.to_v, weights)]

    def _precisions(self, x: Tensor) -> dict[str, Any]:
        coarse = x.dtype == self.v.dtype == torch.bfloat16
        return {**self.exact, "GRAD_PRECISION": "bf16" if coarse else HASH_PRECISION}

    def _weight(self, weights: Tensor | None) -> Tensor | None:
        """Gradient of A (H, m, b): the sum over samples and stretches."""
        if weights is None:
            return None
        return weights.view(-1, self.heads, *weights.shape[1:]).sum(dim=(0, 2))
