"""The order of the backward's launches."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ecoformer.backends.fused import TENSORS, FusedCall, Grads, Needs
from ecoformer.backends.triton import backward as kernels
from ecoformer.backends.triton import causal, groups, plans
from ecoformer.backends.triton.launch import (
    Hashing,
    Launches,
    ceiling,
    key_of,
    nothing_smaller,
    on,
    tensors_of,
)
from ecoformer.backends.triton.plans import Slot, Tensors


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
    """Gradients of `DIFFERENTIABLE`; None where not needed."""
    tensors = [*tensors_of(call), grad, *saved]
    key = ("backward", needs, grad.stride(), grad.dtype, key_of(call))
    with on(call.v.device):
        plan, outputs = plans.run(key, lambda: _Backward(call, tensors, needs), tensors)
        return plan.gradients(outputs)


class _Backward(Launches):
    """The launches of one backward."""

    def __init__(self, call: FusedCall, tensors: Tensors, needs: Needs) -> None:
        super().__init__(call, tensors)
        grad, *saved = (x for x in self.slots[TENSORS:] if x is not None)
        self.grad = grad
        self.codes, self.state, self.table = self.split(saved)
        self.for_q, self.for_k, self.for_v, self.for_key_weight, *weights, for_scale, for_ratio = needs
        # Queries and keys of one set of hash functions share the gradient of its weight.
        apart = call.key_functions is not None
        self.for_weight, self.for_key_hash = weights if apart else (weights[0], weights[0])
        self.for_levels = for_scale or for_ratio
        self.own_keys = call.k is not None
        # Gradients that are rounded to bf16 in the end need no more on the way. Those of scale and ratio need
        # it where queries are summed, in causal order everywhere, and so do those of weights there.
        rounded = [call.q, self.k, call.v, grad, *([self.slots[4]] if self.for_key_weight else [])]
        fine = any(weights) or any(x is not None and x.dtype != torch.bfloat16 for x in rounded)
        fine |= self.causal and (self.for_levels or self.for_key_weight)
        precise: dict[str, Any] = {**self.exact, "PIECES": max(2, cast(int, self.exact["PIECES"]))}
        self.exact = precise if fine else self.exact
        self.summing = precise if self.for_levels else self.exact
        self.reads = self.scratch((self.rows, self.q.shape[2], 2))
        self.to_v = self.output(self.v.shape, self.v.dtype) if self.for_v else None
        self.to_key_weight: Slot | None = None
        if self.for_key_weight and (key_weight := self.slots[4]) is not None:
            self.to_key_weight = self.output(key_weight.shape, key_weight.dtype)
        self.to_q: Slot | None = None
        self.to_k: Slot | None = None
        self.to_levels: list[Slot | None] = [None, None]
        self.weights: list[Slot] = []
        self.key_weights: list[Slot] = self.weights if not apart else []
        if self.causal:
            self._causal()
        elif self.shared:
            self._shared(self.q)
        else:
            self._cross(self.q, self.k)

    def gradients(self, outputs: list[Tensor]) -> Grads:
        """All eight, from the outputs of `run`."""

        def found(slot: Slot | None) -> Tensor | None:
            return None if slot is None else outputs[slot.source - len(self.slots)]

        to_q, to_k = found(self.to_q), found(self.to_k)
        if not self.own_keys:
            to_q, to_k = to_k if to_q is None else to_q if to_k is None else to_q + to_k, None
        weight = self._weight_grad(outputs, self.weights)
        key_hash = None if self.key_weights is self.weights else self._weight_grad(outputs, self.key_weights)
        tokens = [x if needed else None for x, needed in ((to_q, self.for_q), (to_k, self.for_k))]
        levels = (found(slot) for slot in self.to_levels)
        return [*tokens, found(self.to_v), found(self.to_key_weight), weight, key_hash, *levels]

    def _weight_grad(self, outputs: list[Tensor], slots: list[Slot]) -> Tensor | None:
        """Of a weight (H, m, b): the sum over samples and stretches, and over queries and keys."""
        found = [outputs[slot.source - len(self.slots)] for slot in slots]
        sums = [x.view(-1, self.heads, *x.shape[1:]).sum(dim=(0, 2)) for x in found]
        return sum(sums[1:], sums[0]) if sums else None

    def _shared(self, q: Slot) -> None:
        """Tokens have the same codes as queries and as keys."""
        if self.stored and self.config("gather_grad", q).per_sm == 0:
            self._attend_back(q)
        else:
            self.to_q = self._token_grad(q, self.codes[0], *self._gather_grad(q, q), True, True)

    def _cross(self, q: Slot, k: Slot) -> None:
        """Queries and keys have codes of their own."""
        to_state = self._gather_grad(q, k)
        if any(self._for_keys()):
            self.to_k = self._token_grad(k, self.codes[-1], *to_state, False, True)
        if self.for_q or self.for_weight:
            self.to_q = self._token_grad(q, self.codes[0], *to_state, True, False)

    def _for_keys(self) -> tuple[bool, ...]:
        for_tokens = self.for_k if self.own_keys else self.for_q
        return for_tokens, self.for_key_hash, self.for_v, self.for_key_weight

    def _causal(self) -> None:
        codes, key_codes, running = self.codes[0], self.codes[-1], self.state
        stretches, sizes = running.shape[2] - 1, self.in_order()
        shared, partial = {"SHARED": self.shared}, self.scratch(running.shape)
        counts = (self.q.shape[2], self.heads, stretches, self.beta)
        inputs = self._inputs(self.q)
        self.launch(
            causal.causal_gather_grad, self.rows * stretches, nothing_smaller,
            *inputs[:5], *inputs[10:], codes, key_codes, running, partial, self.reads, *self.levels, *counts,
            **shared, **self.whole, **self.masked, **self.exact, **self.reading, **sizes,
        )  # fmt: skip
        self.running_sums(partial, stretches, True)

        def token_grad(x: Slot, queries: bool, keys: bool, to_bit: Slot | None = None) -> Slot | None:
            functions = self.functions if queries else self.key_functions
            stored, added = to_bit is not None and queries, to_bit is not None and keys
            to_x, weights, flags = self._memory_for(x, functions, 0 if stored else stretches, queries, keys)
            terms = self._level_terms(stretches) if queries else None
            self.launch(
                causal.causal_token_grad, self.rows * stretches, nothing_smaller,
                *self._inputs(x), codes, key_codes, running, partial, self.reads,
                *self._targets(to_x, weights), terms or self.v, to_bit or self.v,
                *functions.tensors, *self.levels[:2], *counts,
                QUERIES=queries, KEYS=keys, LEVELS=terms is not None, STORED=stored, ADDED=added,
                **flags, **shared, **self.masked, **self._precisions(x), **self.hashing(functions), **sizes,
            )  # fmt: skip
            self._sum_levels(terms, stretches)
            return to_x

        if self.shared and sizes["STRIDE"] > 1:
            tokens = self.for_q or self.for_weight
            to_bit = self.scratch((*self.q.shape[:3], self.bits)) if tokens else None
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

    def _gather_grad(self, q: Slot, keys: Slot) -> tuple[Slot, Slot, Slot, int]:
        """What `token_grad` loads for queries, keys and values, and the number of parts to add up."""
        config = self.config("gather_grad", q)
        parts, span = self.stretches(config, q.shape[2])
        partial = self.state_memory(self.rows, parts)
        self.launch(
            kernels.gather_grad, self.rows * parts, self.smaller("gather_grad", q, config),
            *self._inputs(q)[:10], self.codes[0], self.reads, self.state, self.table, partial,
            self.levels[2], q.shape[2], self.heads, parts, span, self.beta,
            HASH=self.functions.constants["HASH"],
            **self.weighted, **self.summing, **self.reading, **self.tall(config),
        )  # fmt: skip
        if self.grouped:
            to_buckets, walsh, state_walsh = (self.state_memory(self.rows) for _ in range(3))
            stretches = ceiling(self.reading["E"], self.mixed_columns())
            terms, coefficients = self._level_terms(stretches), (walsh, self.state, state_walsh)
            self.mix_parts(partial, parts, to_buckets, walsh=coefficients, to_levels=terms)
            self._sum_levels(terms, stretches)
            return state_walsh, walsh, to_buckets, 1
        added, parts = self.add_parts(partial, parts, self.scratch(self.state.shape), "token_grad", keys)
        return self.state, added, added, parts

    def _token_grad(
        self,
        x: Slot,
        codes: Slot,
        state: Slot,
        to_state: Slot,
        to_buckets: Slot,
        grad_parts: int,
        queries: bool,
        keys: bool,
    ) -> Slot | None:
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

    def _attend_back(self, q: Slot) -> None:
        self.to_q, weights, flags = self._memory_for(q, self.functions, 1, True, True)
        config = self.config("gather_grad", q)
        mixed = [self.state_memory(self.rows) for _ in range(4)] if self.grouped else [self.state] * 4
        terms = self._level_terms(1)
        self.launch(
            kernels.attend_back, self.rows, self.smaller("gather_grad", q, config),
            *self._inputs(q), self.codes[0], self.reads, self.state, self.table, *mixed,
            *self._targets(self.to_q, weights), terms or self.v,
            *self.functions.tensors, *self.levels, q.shape[2], self.heads, self.beta,
            LEVELS=self.for_levels, **flags, **self.masked, **self._precisions(q),
            **self.hashing(self.functions),
            **self.tall(config),
        )  # fmt: skip
        self._sum_levels(terms, 1)

    def _level_terms(self, stretches: int) -> Slot | None:
        """Memory for terms of the gradients of scale and ratio, if they are needed."""
        return self.scratch((self.rows, stretches, 2, self.reading["F"])) if self.for_levels else None

    def _sum_levels(self, terms: Slot | None, stretches: int) -> None:
        """Gradients of scale and ratio."""
        if terms is None:
            return
        scale, size, features = self.levels[0], self.reading["SIZE"], self.reading["F"]
        self.to_levels = [self.output(scale.shape), self.output(scale.shape)]
        block = max(16, 1 << size)
        self.launch(
            groups.sum_levels, self.heads * (features >> size), nothing_smaller,
            terms, scale, *self.to_levels, self.heads, self.rows // self.heads * stretches, stretches,
            SIZE=size, F=features, ROWS=4096 // block, BS=block, num_warps=8,
        )  # fmt: skip

    def _inputs(self, x: Slot) -> list[Any]:
        values = [self.v, *self.v.strides, *self.mask, *self.key_weight]
        return [self.grad, *self.grad.strides, x, *x.strides, *values]

    def _memory_for(
        self, x: Slot, functions: Hashing, parts: int, queries: bool, keys: bool
    ) -> tuple[Slot | None, Slot | None, dict[str, bool]]:
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

    def _targets(self, to_x: Slot | None, weights: Slot | None) -> list[Slot]:
        # Kernels ignore the pointers of gradients that are not needed.
        return [self.v if x is None else x for x in (to_x, self.to_v, self.to_key_weight, weights)]

    def _precisions(self, x: Slot) -> dict[str, Any]:
        coarse = x.dtype == self.v.dtype == torch.bfloat16
        return {**self.exact, "GRAD_PRECISION": "bf16" if coarse else self.exact["PRECISION"]}
