"""What takes part in a benchmark: modules, and what stands in for their attention when they are checked."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer import reference
from ecoformer.arguments import one_line
from ecoformer.attention import Attention, HashedAttention, SoftmaxAttention
from ecoformer.backends.choice import available, use_backend, why_not
from ecoformer.backends.fused import DTYPES
from ecoformer.backends.fused import Call as FusedCall
from ecoformer.functional import sign_ste
from ecoformer.hashing import FitOptions, Hasher, KernelHasher

QUICK_FIT = FitOptions(steps=5, pairs=5)
"""The quality of hash functions has no influence on their time."""
_DENSE = 1 << 27
"""Largest number of affinities that the dense reference computes."""


@dataclass(frozen=True)
class Contestant:
    """One row of a table.

    Attributes:
        mechanism: its name.
        backend: what computes it.
        module: inputs to output.
        use: the backend to choose for hashed attention; None without hashed attention.
        call: what is timed: `module`, perhaps compiled.
    """

    mechanism: str
    backend: str
    module: nn.Module
    use: str | None = None
    call: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run it by its backend, untimed."""
        with use_backend(self.use):
            return (self.call or self.module)(*inputs)


class Heads(nn.Module):
    """The attention of one layer on heads (B, H, N, D), without projections."""

    def __init__(self, layer: Attention, is_causal: bool) -> None:
        super().__init__()
        self.layer, self.is_causal = layer, is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries are also the keys where the mechanism shares them."""
        return self.layer.attend(q, q if self.layer.shared_qk else k, v, None, self.is_causal)


class ExplicitAttention(SoftmaxAttention):
    """Softmax attention with its N x N matrix in memory, which the paper compares with. Not registered."""

    name = "explicit"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Scores, their softmax, and the weighted mean."""
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], -math.inf)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        weights = scores.softmax(dim=-1)
        if key_padding_mask is not None:
            weights = weights.nan_to_num(0.0)  # a query without keys reads zero
        return F.dropout(weights, self.attn_drop, self.training) @ v


class FlashLinearAttention(nn.Module):
    """The chunked linear attention of flash-linear-attention, which is causal; in fp64 dense."""

    def __init__(self) -> None:
        super().__init__()
        self._chunked: Callable[..., Any] = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Without feature map and normalisation."""
        if q.dtype == torch.float64:
            return (q @ k.mT).tril() @ v
        out: Tensor = self._chunked(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)[0]
        return out.transpose(1, 2)


def flash_linear_attention(device: torch.device) -> tuple[list[Contestant], str]:
    """flash-linear-attention, where it can run, and a note about it."""
    if device.type != "cuda":
        return [], "flash-linear-attention (fla) runs on GPUs only"
    if importlib.util.find_spec("fla") is None:
        return [], "flash-linear-attention (fla) is not installed"
    try:
        peer = Contestant("fla_linear", "fla", FlashLinearAttention())
    except Exception as error:
        return [], f"flash-linear-attention (fla) cannot be imported: {one_line(error, 120)}"
    return [peer], "fla_linear is flash-linear-attention's: always causal, no feature map, not normalised"


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.compile` with a code object of its own, because it compiles only eight variants of one."""

    def run(*tensors: Tensor) -> Tensor:
        return call(*tensors)

    run.__code__ = run.__code__.replace()
    return torch.compile(run, dynamic=False)


def hashed_backends(
    hashers: Iterable[Hasher], device: torch.device, needs_grad: bool, dtype: torch.dtype = torch.float32
) -> list[str]:
    """The backends that run layers with all these hashers on `device` and do not fall back to eager."""
    if dtype not in DTYPES:
        return ["eager"]
    calls = []
    for hasher in hashers:
        if (functions := hasher.functions()) is None:
            return ["eager"]
        token = torch.zeros(1, hasher.num_heads, 1, hasher.head_dim, device=device)
        calls.append(FusedCall(token, None, token, None, functions, 2.0, False))
    names = available(device)
    return [n for n in names if n == "eager" or all(why_not(n, call, needs_grad) is None for call in calls)]


@contextmanager
def reference_attention(model: nn.Module, *, flip_doubtful: bool = False) -> Iterator[list[int]]:
    """Compute hashed attention by the reference and softmax attention by the other way inside the block.

    The dense reference is quadratic: longer layers run by the eager backend, and their lengths are yielded.

    Args:
        model: whose layers are replaced.
        flip_doubtful: flip every other bit of a code that fp32 might get wrong, to see how much rounding may
            change. If all were flipped, products of codes would stay the same.
    """
    long: list[int] = []

    def other(layer: Attention) -> Callable[..., Tensor]:
        own = layer.attend

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
            if q.shape[0] * q.shape[1] * q.shape[2] ** 2 > _DENSE:
                long.append(q.shape[2])
                with use_backend("eager"):
                    return own(q, k, v, mask, is_causal)
            if isinstance(layer, HashedAttention):
                return _hashed(layer, q, v, mask, is_causal, flip_doubtful).to(v.dtype)
            by = SoftmaxAttention if isinstance(layer, ExplicitAttention) else ExplicitAttention
            return by.attend(layer, q, k, v, mask, is_causal)  # type: ignore[arg-type]

        return attend

    layers = [m for m in model.modules() if isinstance(m, (HashedAttention, SoftmaxAttention))]
    for layer in layers:
        layer.attend = other(layer)  # type: ignore[method-assign]
    try:
        yield long
    finally:
        for layer in layers:
            del layer.attend


def _hashed(
    layer: HashedAttention, q: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, flip_doubtful: bool
) -> Tensor:
    """Hashed attention of the paper, dense and in fp64."""
    hasher = layer.hasher
    y = _projections(hasher, q.double())
    if flip_doubtful:
        error = (y - hasher.project(q.float(), None)).abs().amax(dim=-2, keepdim=True)
        doubtful = y.abs() < 4 * error + 1e-6
        y = torch.where(doubtful & (doubtful.cumsum(dim=-2) % 2 == 1), -y, y)
    codes = sign_ste(y, hasher.surrogate, hasher.sign_of_zero)
    heads_mask = None if mask is None else mask[:, None]
    return reference.hash_attention(codes, codes, v.double(), heads_mask, is_causal, layer.bias)


def _projections(hasher: Hasher, tokens: Tensor) -> Tensor:
    if not isinstance(hasher, KernelHasher) or hasher.sigma_from != "stored":
        return hasher.project(tokens, None)
    support, sigma = hasher.support_samples.double(), hasher.sigma.double().view(-1, 1, 1)
    kernel = reference.rbf_kernel(reference.unit(tokens), support, sigma)
    return (kernel - hasher.mean.double().unsqueeze(-2)) @ hasher.weight.double()
