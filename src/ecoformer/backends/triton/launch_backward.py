"""The order of the backward's launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.backends.fused import FusedCall, Grads, Needs
from ecoformer.backends.triton import backward as kernels
from ecoformer.backends.triton import causal, plans
from ecoformer.backends.triton.launch import (
    TENSORS,
    Hashing,
    Launches,
    key_of,
    nothing_smaller,
    on,
    tensors_of,
)
from ecoformer.backends.triton.plans import Place, Tensors


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
    """Gradients of `DIFFERENTIABLE`; None where not needed."""
    tensors = [*tensors_of(call), grad, *saved]
    key = ("backward", needs, grad.stride(), grad.dtype, key_of(call))
    with on(call.v.device):
        plan, outputs = plans.run(key, lambda: _Backward(call, tensors, needs), tensors)
        return plan.gradients(outputs, call, saved[1 if call.shared_codes else 2])


class _Backward(Launches):
    """The launches of one backward."""

    def __init__(self, call: FusedCall, tensors: Tensors, needs: Needs) -> None:
        super().__init__(call, tensors)
        grad, *saved = (x for x in self.places[TENSORS:] if x is not None)
        self.grad, self.codes = grad, saved[: 1 if self.shared else 2]
        self.state, self.table = saved[len(self.codes)], saved[-1]
        self.for_q, self.for_k, self.for_v, self.for_key_weight, *weights, for_scale, for_ratio = needs
        # Queries and keys of one set of hash functions share the gradient of its weight.
        apart = call.key_functions is not None
        self.for_weight, self.for_key_hash = weights if apart else (weights[0], weights[0])
        self.for_levels = for_scale or for_ratio
        self.own_keys = call.k is not None
        # Gradients that are all rounded to bf16 in the end need no more on the way.
        halves = all(x.dtype == torch.bfloat16 for x in (call.q, self.k, call.v, grad))
        precise = any(weights) or self.for_levels or self.for_key_weight
        if self.grouped and halves and not precise:
            self.exact = {**self.exact, "PIECES": 1}
        self.reads = self.room((self.rows, self.q.shape[2], 2))
        self.to_v = self.output(self.v.shape, self.v.dtype) if self.for_v else None
        self.to_key_weight: Place | None = None
        if self.for_key_weight and (key_weight := self.places[4]) is not None:
            self.to_key_weight = self.output(key_weight.shape, key_weight.dtype)
        self.to_q: Place | None = None
        self.to_k: Place | None = None
        self.to_table: Place | None = None
        self.to_levels: Place | None = None
        self.weights: list[Place] = []
        self.key_weights: list[Place] = self.weights if not apart else []
        if self.causal:
            self._causal()
        elif self.shared:
            self._shared(self.q)
        else:
            self._cross(self.q, self.k)

    def gradients(self, outputs: list[Tensor], call: FusedCall, state: Tensor) -> Grads:
        """All eight, of what `run` gave."""

        def found(place: Place | None) -> Tensor | None:
            return None if place is None else outputs[place.source - len(self.places)]

        to_q, to_k = found(self.to_q), found(self.to_k)
        if not self.own_keys:
            to_q, to_k = to_k if to_q is None else to_q if to_k is None else to_q + to_k, None
        weight = self._weight_grad(outputs, self.weights)
        key_hash = None if self.key_weights is self.weights else self._weight_grad(outputs, self.key_weights)
        levels: list[Tensor | None] = [None, None]
        if (to_table := found(self.to_table)) is not None:
            levels = level_grads(call, state, to_table)
        if (to_levels := found(self.to_levels)) is not None:
            levels = causal_level_grads(call, to_levels)
        tokens = [x if needed else None for x, needed in ((to_q, self.for_q), (to_k, self.for_k))]
        return [*tokens, found(self.to_v), found(self.to_key_weight), weight, key_hash, *levels]

    def _weight_grad(self, outputs: list[Tensor], places: list[Place]) -> Tensor | None:
        """Of a weight (H, m, b): the sum over samples and stretches, and over queries and keys."""
        found = [outputs[place.source - len(self.places)] for place in places]
        sums = [x.view(-1, self.heads, *x.shape[1:]).sum(dim=(0, 2)) for x in found]
        return sum(sums[1:], sums[0]) if sums else None

    def _shared(self, q: Place) -> None:
        """A token's code as a query is its code as a key."""
        if self.config("gather_grad", q).per_sm == 0:
            self._attend_back(q)
        else:
            self.to_q = self._token_grad(q, self.codes[0], *self._gather_grad(q, q), True, True)

    def _cross(self, q: Place, k: Place) -> None:
        """Queries and keys have codes of their own."""
        to_state = self._gather_grad(q, k)
        if any(self._for_keys()):
            self.to_k = self._token_grad(k, self.codes[1], *to_state, False, True)
        if self.for_q or self.for_weight:
            self.to_q = self._token_grad(q, self.codes[0], *to_state, True, False)

    def _for_keys(self) -> tuple[bool, ...]:
        for_tokens = self.for_k if self.own_keys else self.for_q
        return for_tokens, self.for_key_hash, self.for_v, self.for_key_weight

    def _causal(self) -> None:
        (codes, *_, key_codes), running = 2 * self.codes, self.state
        stretches, sizes = running.shape[2] - 1, self.in_order()
        shared, partial = {"SHARED": self.shared}, self.room(running.shape)
        counts = (self.q.shape[2], self.heads, stretches, self.beta)
        inputs = self._inputs(self.q)
        self.launch(
            causal.causal_gather_grad, self.rows * stretches, nothing_smaller,
            *inputs[:5], *inputs[10:], codes, key_codes, running, partial, self.reads, *self.levels, *counts,
            **shared, **self.whole, **self.masked, **self.exact, **self.reading, **sizes,
        )  # fmt: skip
        self.running_sums(partial, stretches, True)

        def token_grad(x: Place, queries: bool, keys: bool, to_bit: Place | None = None) -> Place | None:
            functions = self.functions if queries else self.key_functions
            stored, added = to_bit is not None and queries, to_bit is not None and keys
            to_x, weights, flags = self._memory_for(x, functions, 0 if stored else stretches, queries, keys)
            to_levels = None
            if queries and self.for_levels:
                to_levels = self.to_levels = self.output((self.rows, stretches, 2, self.state_shape[0]))
            self.launch(
                causal.causal_token_grad, self.rows * stretches, nothing_smaller,
                *self._inputs(x), codes, key_codes, running, partial, self.reads,
                *self._targets(to_x, weights), to_levels or self.v, to_bit or self.v,
                *functions.tensors, *self.levels[:2], *counts,
                QUERIES=queries, KEYS=keys, LEVELS=to_levels is not None, STORED=stored, ADDED=added,
                **flags, **shared, **self.masked, **self._precisions(x), **self.hashing(functions), **sizes,
            )  # fmt: skip
            return to_x

        if self.shared and sizes["STRIDE"] > 1:
            tokens = self.for_q or self.for_weight
            to_bit = self.room((*self.q.shape[:3], self.bits)) if tokens else None
            if tokens or self.for_levels:
                token_grad(self.q, True, False, to_bit)
            self.to_q = token_grad(self.q, False, True, to_bit)
            return
        if self.shared:
            self.to_q = token_grad(self.q, True, True)
            return
        if any(self._for_keys()):
            self.to_k = token_grad(self.k, False, True)
        if self.for_q or self.for_weight or self.for_levels:
            self.to_q = token_grad(self.q, True, False)

    def _gather_grad(self, q: Place, keys: Place) -> tuple[Place, Place, Place, int]:
        """What `token_grad` loads: for queries, for keys and for values, and how many parts to add up."""
        config = self.config("gather_grad", q)
        parts, span = self.stretches(config, q.shape[2])
        partial = self._to_state(parts)
        self.launch(
            kernels.gather_grad, self.rows * parts, self.smaller("gather_grad", q, config),
            self.grad, *self.grad.strides, self.codes[0], self.reads, self.state, self.table, partial,
            self.levels[2], q.shape[2], self.heads, parts, span, self.beta,
            **self.weighted, **self.exact, **self.reading, **self.tall(config),
        )  # fmt: skip
        if self.grouped:
            to_buckets, walsh, state_walsh = (self.state_room(self.rows) for _ in range(3))
            self.mix_parts(partial, parts, to_buckets, walsh=walsh, other=(self.state, state_walsh))
            return state_walsh, walsh, to_buckets, 1
        added, parts = self.add_parts(partial, parts, self.room(self.state.shape), "token_grad", keys)
        return self.state, added, added, parts

    def _to_state(self, parts: int) -> Place:
        """Memory for partial gradients of the state, which the gradients of the affinity need too."""
        if not self.for_levels:
            return self.state_room(self.rows, parts)
        self.to_table = self.output((self.rows, parts, *self.state_shape))
        return self.to_table

    def _token_grad(
        self,
        x: Place,
        codes: Place,
        state: Place,
        to_state: Place,
        to_buckets: Place,
        grad_parts: int,
        queries: bool,
        keys: bool,
    ) -> Place | None:
        config = self.config("token_grad", x)
        parts, span = self.stretches(config, x.shape[2])
        functions = self.functions if queries else self.key_functions
        to_x, weights, flags = self._memory_for(x, functions, parts, queries, keys)
        self.launch(
            kernels.token_grad, self.rows * parts, self.smaller("token_grad", x, config),
            *self._inputs(x), codes, self.reads, state, to_state, to_buckets, *self._targets(to_x, weights),
            *functions.tensors, x.shape[2], self.heads, grad_parts, parts, span,
            SINGLE=span == config.block, QUERIES=queries, KEYS=keys, **flags,
            **self.masked, **self._precisions(x), **self.hashing(functions), **self.options(config),
        )  # fmt: skip
        return to_x

    def _attend_back(self, q: Place) -> None:
        self.to_q, weights, flags = self._memory_for(q, self.functions, 1, True, True)
        config = self.config("gather_grad", q)
        mixed = [self.state_room(self.rows) for _ in range(3)] if self.grouped else [self.state] * 3
        self.launch(
            kernels.attend_back, self.rows, self.smaller("gather_grad", q, config),
            *self._inputs(q), self.codes[0], self.reads, self.state, self.table, self._to_state(1), *mixed,
            *self._targets(self.to_q, weights), *self.functions.tensors, *self.levels,
            q.shape[2], self.heads, self.beta,
            **flags, **self.masked, **self._precisions(q), **self.hashing(self.functions),
            **self.tall(config),
        )  # fmt: skip

    def _inputs(self, x: Place) -> list[Any]:
        values = [self.v, *self.v.strides, *self.mask, *self.key_weight]
        return [self.grad, *self.grad.strides, x, *x.strides, *values]

    def _memory_for(
        self, x: Place, functions: Hashing, parts: int, queries: bool, keys: bool
    ) -> tuple[Place | None, Place | None, dict[str, bool]]:
        """Memory for gradients of tokens and of the hash functions' weight, and what is to be computed.

        With no `parts` the tokens' own gradients are left to a later launch.
        """
        for_tokens, for_key_hash, for_v, for_key_weight = self._for_keys()
        for_weight = self.for_weight if queries else for_key_hash
        tokens = for_weight or (self.for_q if queries else for_tokens)
        to_x = self.output(x.shape, x.dtype) if tokens and parts else None
        weights = None
        for_weight = for_weight and parts > 0
        if for_weight:
            weights = self.output((self.rows, parts, functions.constants["M"], self.bits))
            (self.weights if queries else self.key_weights).append(weights)
        values = {"VALUES": keys and for_v, "KEY_WEIGHT": keys and for_key_weight}
        return to_x, weights, {"TOKENS": tokens, "WEIGHT": for_weight, **values}

    def _targets(self, to_x: Place | None, weights: Place | None) -> list[Place]:
        # A kernel never looks at the pointers of what it is not asked for.
        return [self.v if x is None else x for x in (to_x, self.to_v, self.to_key_weight, weights)]

    def _precisions(self, x: Place) -> dict[str, Any]:
        coarse = x.dtype == self.v.dtype == torch.bfloat16
        return {**self.exact, "GRAD_PRECISION": "bf16" if coarse else self.exact["PRECISION"]}


def level_grads(call: FusedCall, state: Tensor, to_table: Tensor) -> list[Tensor | None]:
    """Gradients of `scale` and `ratio` from buckets (B, H, F, E + 1) and the table's gradient, in parts."""
    if call.scale is None or call.ratio is None:
        return [None, None]
    batch, heads, _, width = state.shape
    shape = (batch, heads, call.groups, -1, width)
    # As (H, G, 2^s, B * (E + 1)), so that one product sums over samples and channels.
    buckets, to_table = (
        x.double().permute(1, 2, 3, 0, 4).flatten(-2)
        for x in (state.view(shape), to_table.view(batch, heads, -1, *state.shape[2:]).sum(2).view(shape))
    )
    to_mixing = to_table @ buckets.mT
    value = torch.arange(to_mixing.shape[-1], device=state.device)
    differ = value[:, None] ^ value
    distance = sum(((differ >> bit) & 1 for bit in range(call.bits // call.groups)), torch.zeros_like(differ))
    scale, ratio = (x.double()[..., None, None] for x in (call.scale, call.ratio))
    slope = distance * ratio ** (distance - 1).clamp_min(0) * scale
    return [(to_mixing * x).sum(dim=(-2, -1)).float() for x in (ratio**distance, slope)]


def causal_level_grads(call: FusedCall, to_levels: Tensor) -> list[Tensor | None]:
    """Gradients of `scale` and `ratio` from the sums (B * H, ., 2, F) of `causal_token_grad`."""
    if call.scale is None:
        return [None, None]
    sums = to_levels.view(
        call.q.shape[0], call.q.shape[1], -1, 2, call.groups, to_levels.shape[-1] // call.groups
    )
    to_scale, to_ratio = sums.sum(dim=(0, 2, -1)).unbind(1)
    return [to_scale / call.scale, to_ratio]
