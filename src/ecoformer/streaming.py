"""Causal hashed attention over a stream: a state of fixed size in the place of a growing cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ecoformer.affinity import Affinity, Bias
from ecoformer.arguments import shape
from ecoformer.functional import CodeCall


class HashAttentionState:
    """What causal attention remembers of the tokens seen: (F + 1) x (D + 1) numbers a head.

    `update` takes one or many tokens and gives what `hash_attention(..., is_causal=True)` over all tokens so
    far would give for them. Gradients flow through the state from call to call, as in a recurrent network;
    `detach()` cuts them, `reset()` forgets everything.

    Args:
        bias: as in `hash_attention`.
        affinity: as in `hash_attention`.
    """

    def __init__(self, bias: Bias = "paper", *, affinity: Affinity | None = None) -> None:
        Affinity.of(bias, 1)  # an unknown bias is refused here, not at the first token
        self.bias: Bias = bias
        self.affinity = affinity
        self.sums: Tensor | None = None

    def update(
        self,
        codes_q: Tensor,
        codes_k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        key_weight: Tensor | None = None,
        bits: int | None = None,
    ) -> Tensor:
        """Take the next tokens (arguments as in `hash_attention`) and return their outputs (..., N, D)."""
        options = (key_padding_mask, key_weight, True, self.bias, self.affinity, bits)
        call = CodeCall(codes_q, codes_k, v, *options)
        expected = (*v.shape[:-2], call.f_k.shape[-1] + 1, v.shape[-1] + 1)
        if self.sums is not None and self.sums.shape != expected:
            raise ValueError(
                f"the state holds {shape(self.sums)}, but codes_k {shape(codes_k)} and v {shape(v)} "
                f"need {expected}: keep batch, heads, bits and D, or reset() the state"
            )
        out = call.causal(self.sums)
        new = call.sums().to(torch.float64)  # fp32 would stop counting tokens at 2^24
        self.sums = new if self.sums is None else self.sums + new
        return out

    def detach(self) -> HashAttentionState:
        """Cut the gradient to earlier tokens; returns the state itself."""
        if self.sums is not None:
            self.sums = self.sums.detach()
        return self

    def reset(self) -> HashAttentionState:
        """Forget all tokens; returns the state itself."""
        self.sums = None
        return self

    def numbers_per_head(self) -> int:
        """How many numbers a head's state holds, whatever the number of tokens seen."""
        return 0 if self.sums is None else self.sums.shape[-2] * self.sums.shape[-1]
