"""The order of the backward's launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecoformer.backends.fused import Call, Grads, Needs
from ecoformer.backends.triton import backward as kernels
from ecoformer.backends.triton import causal
from ecoformer.backends.triton.configs import Config
from ecoformer.backends.triton.launch import Launches, on


def backward(call: Call, grad: Tensor, saved: list[Tensor], needs: Needs, /) -> Grads:
    """Gradients of q, k, v and the weight; None where not needed."""
    with on(call.v.device):
        return _Backward(call, grad, saved, needs).run()


class _Backward(Launches):
    """The launches of one backward."""

    def __init__(self, call: Call, grad: Tensor, saved: list[Tensor], needs: Needs) -> None:
        super().__init__(call)
        self.grad, self.saved, self.needs = grad, saved, needs
        v = call.v
        self.reads = self.room(self.rows, call.q.shape[2], 2)
        self.to_v = torch.empty(v.shape, dtype=v.dtype, device=v.device) if needs[2] else None

    def run(self) -> Grads:
        """The gradients."""
        if self.causal:
            return self._causal(self.q)
        return self._shared(self.q) if self.k is None else self._cross(self.q, self.k)

    def _shared(self, q: Tensor) -> Grads:
        """Queries are the keys."""
        codes, state = self.saved
        if self.config("gather_grad", q).per_sm == 0:
            to_q, to_weight = self._attend_back(q)
        else:
            to_state = self._gather_grad(q, codes, state, q)
            to_q, to_weight = self._token_grad(q, codes, *to_state, True, True)
        return to_q if self.needs[0] else None, None, self.to_v, to_weight

    def _cross(self, q: Tensor, k: Tensor) -> Grads:
        """Keys of their own."""
        codes_q, codes_k, state = self.saved
        to_q = to_k = None
        weights = []
        to_state = self._gather_grad(q, codes_q, state, k)
        if any(self.needs[1:]):
            to_k, to_weight = self._token_grad(k, codes_k, *to_state, False, True)
            weights.append(to_weight)
        if self.needs[0] or self.needs[3]:
            to_q, to_weight = self._token_grad(q, codes_q, state, 1, True, False)
            weights.append(to_weight)
        to_weight = weights[0] + weights[1] if self.needs[3] else None  # type: ignore[operator]
        return to_q if self.needs[0] else None, to_k if self.needs[1] else None, self.to_v, to_weight

    def _causal(self, q: Tensor) -> Grads:
        """In causal order, where queries are the keys."""
        codes, running = self.saved
        n, blocks, options = q.shape[2], running.shape[2] - 1, self.causal_options(q)
        grid, sizes = (self.rows * blocks,), (n, self.heads, blocks, self.beta)
        partial = torch.empty_like(running)
        causal.causal_gather_grad[grid](
            self.grad, *self.grad.stride(), self.v, *self.v.stride(), *self.mask, codes, running, partial,
            self.reads, *sizes, **self.whole, **self.masked, **self.exact, **self.reading, **options,
        )  # fmt: skip
        self.running_sums(partial, blocks, True)
        to_q, weights, flags = self._room_for(q, blocks, values=True)
        causal.causal_token_grad[grid](
            *self._inputs(q), codes, running, partial, self.reads, *self._outputs(to_q, weights),
            *self.functions, *sizes, **flags, **self.masked, **self._precisions(q), **self.hashing, **options,
        )  # fmt: skip
        return to_q if self.needs[0] else None, None, self.to_v, self._weight(weights)

    def _gather_grad(self, q: Tensor, codes: Tensor, state: Tensor, keys: Tensor) -> tuple[Tensor, int]:
        """Partial gradients of the state for the keys' gradients, and how many there are."""

        def launch(config: Config) -> tuple[Tensor, int]:
            parts, span = self.stretches(config, q.shape[2])
            partial = self.state_room(self.rows, parts)
            kernels.gather_grad[(self.rows * parts,)](
                self.grad, *self.grad.stride(), codes, self.reads, state, partial,
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
            kernels.token_grad[(self.rows * parts,)](
                *self._inputs(x), codes, self.reads, self.saved[-1], to_state, *self._outputs(to_x, weights),
                *self.functions, x.shape[2], self.heads, grad_parts, parts, span,
                SINGLE=span == config.block, QUERIES=queries, KEYS=keys, **flags,
                **self.masked, **self._precisions(x), **self.hashing,
                **self.options(config),
            )  # fmt: skip
            return to_x, self._weight(weights)

        return self.fitting("token_grad", x, launch)

    def _attend_back(self, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
        to_q, weights, flags = self._room_for(q, 1, values=True)

        def launch(config: Config) -> None:
            kernels.attend_back[(self.rows,)](
                *self._inputs(q), self.saved[0], self.reads, self.saved[1],
                *self._outputs(to_q, weights), *self.functions,
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
        tokens = self.needs[3] or (is_query if self.k is None or not values else is_key)
        to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if tokens else None
        weights = None
        if self.needs[3]:
            weights = self.room(self.rows, parts, self.support.shape[1], self.bits)
        flags = {"TOKENS": tokens, "VALUES": values and self.needs[2], "WEIGHT": self.needs[3]}
        return to_x, weights, flags

    def _outputs(self, to_x: Tensor | None, weights: Tensor | None) -> list[Tensor]:
        # A kernel never looks at the pointers of what it is not asked for.
        return [self.v if x is None else x for x in (to_x, self.to_v, weights)]

    def _precisions(self, x: Tensor) -> dict[str, Any]:
        coarse = x.dtype == self.v.dtype == torch.bfloat16
        return {**self.exact, "GRAD_PRECISION": "bf16" if coarse else self.exact["PRECISION"]}

    def _weight(self, weights: Tensor | None) -> Tensor | None:
        """Gradient of A (H, m, b): the sum over samples and stretches."""
        if weights is None:
            return None
        return weights.view(-1, self.heads, *weights.shape[1:]).sum(dim=(0, 2))
