"""Hashed attention counted as the "cpu" backend executes it, while a model runs on shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ecoformer.accounting.counts import Counts
from ecoformer.accounting.executed import Counting
from ecoformer.accounting.mechanisms.eco_cpu import operator, refusal, samples_of
from ecoformer.accounting.mechanisms.parts import Heads
from ecoformer.attention import HashedAttention
from ecoformer.backends.fused import empty_out


class CpuKernels:
    """The CPU kernels' part in a count. numba need not be installed."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        """Hashed layers that the kernels did not compute, by name, and why: those ran in single steps."""

    @contextmanager
    def standing_in(self, model: nn.Module, counting: Counting) -> Iterator[None]:
        """Hashed layers attend by the kernels wherever these can, and their formula is counted."""
        found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, HashedAttention)]
        layers = [(name, layer) for name, layer in found if "attend" not in layer.__dict__]
        self.refused |= {
            name: "its attend was replaced" for name, layer in found if "attend" in layer.__dict__
        }
        try:
            for name, layer in layers:
                layer.__dict__["attend"] = partial(self._attend, name, layer, counting, refusal(layer))
            yield
        finally:
            for _, layer in layers:
                layer.__dict__.pop("attend", None)

    def _attend(
        self,
        name: str,
        layer: HashedAttention,
        counting: Counting,
        why: str | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        if why is None and is_causal:
            why = "causal order has no formula"
        if why is None and torch.float64 in (q.dtype, v.dtype):
            why = "the kernels compute in fp32"
        if why is not None or not q.numel():
            if why is not None:
                self.refused[name] = why
            return type(layer).attend(layer, q, k, v, key_padding_mask, is_causal)
        dtype, q, v = v.dtype, q.float(), v.float()
        heads = Heads(q.shape[0], q.shape[1], q.shape[2], q.shape[3])
        flags = 0 if key_padding_mask is None else key_padding_mask.numel()
        work = operator(heads, layer.hasher.bits, samples_of(layer), own_value=layer.bias == "official")
        counting.add(work + Counts(bytes=flags))
        return empty_out(q, v).to(dtype)
