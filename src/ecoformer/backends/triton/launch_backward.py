"""The order of the backward's launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.backends.fused import FusedCall, Grads, Needs
from ecoformer.backends.triton import backward as kernels
from ecoformer.backends.triton import causal, plans
from ecoformer.backends.triton.configs import causal_config
from ecoformer.backends.triton.launch import Launches, key_of, nothing_smaller, on, tensors_of
from ecoformer.backends.triton.plans import Place, Tensors


def backward(call: FusedCall, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
    """Gradients of q, k, v and the hash functions' weight; None where not needed."""
    needs = (*needs[:3], needs[4])
    tensors = [*tensors_of(call), grad, *saved]
    key = ("backward", needs, grad.stride(), grad.dtype, key_of(call))
    with on(call.v.device):
        plan, outputs = plans.run(key, lambda: _Backward(call, tensors, needs), tensors)
        to_q, to_k, to_v, to_weight = plan.gradients(outputs)
        return [to_q, to_k, to_v, None, to_weight, None, None, None]


class _Backward(Launches):
    """The launches of one backward."""

    def __init__(self, call: FusedCall, tensors: Tensors, needs: Needs) -> None:
        super().__init__(call, tensors)
        grad, *saved = (x for x in self.places[8:] if x is not None)
        self.grad, self.saved, self.needs = grad, saved, needs
        self.reads = self.room((self.rows, self.q.shape[2], 2))
        self.to_v = self.output(self.v.shape, self.v.dtype) if needs[2] else None
        self.to_q: Place | None = None
        self.to_k: Place | None = None
        self.weights: list[Place] = []
        if self.causal:
            self._causal(self.q)
        elif self.k is None:
            self._shared(self.q)
        else:
            self._cross(self.q, self.k)

    def gradients(self, outputs: list[Tensor]) -> Grads:
        """Those of q, k, v and the weight, of what `run` gave."""

        def found(place: Place) -> Tensor:
            return outputs[place.source - len(self.places)]

        wanted = zip((self.to_q, self.to_k, self.to_v), self.needs, strict=False)
        tokens = [found(x) if x is not None and needed else None for x, needed in wanted]
        # Of A (H, m, b): the sum over samples and stretches, and over queries and keys.
        sums = [found(x).view(-1, self.heads, *x.shape[1:]).sum(dim=(0, 2)) for x in self.weights]
        return [*tokens, sum(sums[1:], sums[0]) if sums else None]

    def _shared(self, q: Place) -> None:
        """Queries are the keys."""
        codes, state = self.saved
        if self.config("gather_grad", q).per_sm == 0:
            self._attend_back(q)
        else:
            to_state = self._gather_grad(q, codes, state, q)
            self.to_q = self._token_grad(q, codes, *to_state, True, True)

    def _cross(self, q: Place, k: Place) -> None:
        """Keys of their own."""
        codes_q, codes_k, state = self.saved
        to_state = self._gather_grad(q, codes_q, state, k)
        if any(self.needs[1:]):
            self.to_k = self._token_grad(k, codes_k, *to_state, False, True)
        if self.needs[0] or self.needs[3]:
            self.to_q = self._token_grad(q, codes_q, state, 1, True, False)

    def _causal(self, q: Place) -> None:
        """In causal order, where queries are the keys."""
        codes, running = self.saved
        n, blocks, options = q.shape[2], running.shape[2] - 1, self.options(causal_config(self.sizes(q)))
        grid, sizes = (self.rows * blocks, nothing_smaller), (n, self.heads, blocks, self.beta)
        partial = self.room(running.shape)
        self.launch(
            causal.causal_gather_grad, *grid,
            self.grad, *self.grad.strides, self.v, *self.v.strides, *self.mask, codes, running, partial,
            self.reads, *sizes, **self.whole, **self.masked, **self.exact, **self.reading, **options,
        )  # fmt: skip
        self.running_sums(partial, blocks, True)
        self.to_q, weights, flags = self._room_for(q, blocks, values=True)
        self.launch(
            causal.causal_token_grad, *grid,
            *self._inputs(q), codes, running, partial, self.reads, *self._targets(self.to_q, weights),
            *self.functions, *sizes, **flags, **self.masked, **self._precisions(q), **self.hashing, **options,
        )  # fmt: skip

    def _gather_grad(self, q: Place, codes: Place, state: Place, keys: Place) -> tuple[Place, int]:
        """Partial gradients of the state for the keys' gradients, and how many there are."""
        config = self.config("gather_grad", q)
        parts, span = self.stretches(config, q.shape[2])
        partial = self.state_room(self.rows, parts)
        self.launch(
            kernels.gather_grad, self.rows * parts, self.smaller("gather_grad", q, config),
            self.grad, *self.grad.strides, codes, self.reads, state, partial,
            q.shape[2], self.heads, parts, span, self.beta,
            **self.exact, **self.reading, **self.options(config),
        )  # fmt: skip
        return self.add_parts(partial, parts, self.room(state.shape), "token_grad", keys)

    def _token_grad(
        self, x: Place, codes: Place, to_state: Place, grad_parts: int, queries: bool, keys: bool
    ) -> Place | None:
        config = self.config("token_grad", x)
        parts, span = self.stretches(config, x.shape[2])
        to_x, weights, flags = self._room_for(x, parts, values=keys)
        self.launch(
            kernels.token_grad, self.rows * parts, self.smaller("token_grad", x, config),
            *self._inputs(x), codes, self.reads, self.saved[-1], to_state, *self._targets(to_x, weights),
            *self.functions, x.shape[2], self.heads, grad_parts, parts, span,
            SINGLE=span == config.block, QUERIES=queries, KEYS=keys, **flags,
            **self.masked, **self._precisions(x), **self.hashing, **self.options(config),
        )  # fmt: skip
        return to_x

    def _attend_back(self, q: Place) -> None:
        self.to_q, weights, flags = self._room_for(q, 1, values=True)
        config = self.config("gather_grad", q)
        self.launch(
            kernels.attend_back, self.rows, self.smaller("gather_grad", q, config),
            *self._inputs(q), self.saved[0], self.reads, self.saved[1],
            *self._targets(self.to_q, weights), *self.functions,
            q.shape[2], self.heads, self.beta,
            **flags, **self.masked, **self._precisions(q), **self.hashing, **self.options(config),
        )  # fmt: skip

    def _inputs(self, x: Place) -> list[Any]:
        return [self.grad, *self.grad.strides, x, *x.strides, self.v, *self.v.strides, *self.mask]

    def _room_for(
        self, x: Place, parts: int, values: bool
    ) -> tuple[Place | None, Place | None, dict[str, bool]]:
        """Room for gradients of tokens and weight, and what is to be computed."""
        is_query, is_key = self.needs[0], self.needs[1]
        tokens = self.needs[3] or (is_query if self.k is None or not values else is_key)
        to_x = self.output(x.shape, x.dtype) if tokens else None
        weights = None
        if self.needs[3]:
            weights = self.output((self.rows, parts, self.support.shape[1], self.bits))
            self.weights.append(weights)
        flags = {"TOKENS": tokens, "VALUES": values and self.needs[2], "WEIGHT": self.needs[3]}
        return to_x, weights, flags

    def _targets(self, to_x: Place | None, weights: Place | None) -> list[Place]:
        # A kernel never looks at the pointers of what it is not asked for.
        return [self.v if x is None else x for x in (to_x, self.to_v, weights)]

    def _precisions(self, x: Place) -> dict[str, Any]:
        coarse = x.dtype == self.v.dtype == torch.bfloat16
        return {**self.exact, "GRAD_PRECISION": "bf16" if coarse else self.exact["PRECISION"]}
