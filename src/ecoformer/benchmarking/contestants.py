"""What takes part in a benchmark, and how its results are compared before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecoformer.attention import Attention, HashedAttention, SoftmaxAttention
from ecoformer.backends.choice import available, use_backend, why_not
from ecoformer.backends.fused import DTYPES, FusedCall
from ecoformer.benchmarking.results import Check
from ecoformer.hashing import Hasher

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Largest relative error of an output; gradients may have three times as much."""
_OUTPUTS = {False: 1e-2, True: 1e-1}
"""Bounds for a model's outputs in fp32 and in half precision, including codes that rounding flips."""
_GRADIENTS = {False: 5e-2, True: 2.5e-1}
"""Bounds for the gradient of a parameter: rounding also decides where the gradient of the sign vanishes."""
_SMALLEST = 1e-3
"""Gradients smaller than this share of the total are judged as if they had this size."""
_NOISE, _ROUNDING = 4.0, 2.0
"""How often the difference of two plain runs is allowed, because SDPA's backward adds in another order every
time; and how often what half precision changes: for an N x N matrix that is most of a gradient."""

Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Contestant:
    """A module to time by `call` (default: itself); `use` is the backend to choose for hashed attention."""

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
    """The attention of one layer on heads (B, H, N, D), without projections.

    A layer that projects to codes takes the first channels of q and k for its projections.
    """

    def __init__(self, layer: Attention, is_causal: bool) -> None:
        super().__init__()
        self.layer, self.is_causal = layer, is_causal
        self.shared = layer.shared_qk and not getattr(layer, "separate", False)
        self._weight = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries are also the keys where the mechanism shares them."""
        layer, more = self.layer, {}
        if isinstance(layer, HashedAttention):
            q, k = (x[..., : layer.hasher.head_dim] for x in (q, k))
            if layer.key_weights is not None:
                if self._weight.shape != v.shape[:-1] or self._weight.device != v.device:
                    self._weight = torch.ones(v.shape[:-1], device=v.device)
                more = {"key_weight": self._weight}
        return layer.attend(q, q if self.shared else k, v, None, self.is_causal, **more)


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
        calls.append(FusedCall.simple(token, token, functions))
    names = available(device)
    return [n for n in names if n == "eager" or all(why_not(n, call, needs_grad) is None for call in calls)]


def bound_of(dtype: torch.dtype, backward: bool, tokens: int = 0) -> float:
    """Largest relative error. Beyond 1024 tokens it grows with the root of their number, as long sums do."""
    return BOUNDS[dtype] * (3 if backward else 1) * math.sqrt(max(tokens, 1024) / 1024)


@torch.no_grad()
def relative_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The largest |result - truth| / |truth| of the pairs; NaN if any is. A truth of zero counts as one."""
    errors = [0.0]
    for result, truth in zip(results, truths, strict=True):
        if result.shape != truth.shape:
            return math.nan
        difference = float(torch.linalg.vector_norm(result.to(truth.dtype) - truth, dtype=torch.float64))
        size = float(torch.linalg.vector_norm(truth, dtype=torch.float64))
        root = math.sqrt(truth.numel())
        errors.append(difference / (size if size > 1e-6 * root else root))
    return float(torch.tensor(errors, dtype=torch.float64).max())


@torch.no_grad()
def median_error(results: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The median over all tokens, for mechanisms that sort by hashes: ties move single tokens."""
    errors = []
    for result, truth in zip(results, truths, strict=True):
        difference = (result.to(truth.dtype) - truth).norm(dim=-1)
        errors.append(float((difference / truth.norm(dim=-1).clamp_min(1e-12)).median()))
    return max(errors)


def check_inference(timed: Forward, plain_on_first: Forward, half: bool) -> Check:
    """Compare the first sample's output with a plain run of the model on that sample."""
    with torch.inference_mode():
        found, truth = timed()[:1].float(), plain_on_first().float()
    return Check(relative_error([found], [truth]), _OUTPUTS[half], "a plain run of the first sample")


def check_training(
    timed: Forward, plain: Forward, model: nn.Module, precise: Forward | None = None
) -> Check | None:
    """Compare gradients of the loss that is timed; None for a model that draws random numbers.

    Args:
        timed: what is timed.
        plain: the same model in plain PyTorch.
        model: whose gradients are compared.
        precise: `plain` in fp32, where that is in half precision.
    """
    half = precise is not None
    with torch.no_grad():
        once, again = (plain().float() for _ in range(2))
    if not relative_error([again], [once]) <= _OUTPUTS[half]:
        return None
    found, truth, repeated = (_gradients(forward, model) for forward in (timed, plain, plain))
    allowed = _NOISE * _distances(repeated, truth)
    if precise is not None:
        try:
            allowed += _ROUNDING * _distances(_gradients(precise, model), truth)
        except torch.OutOfMemoryError:  # then the check is stricter
            model.zero_grad(set_to_none=True)
    sizes = torch.stack([x.double().norm() for x in truth])
    beyond = (_distances(found, truth) - allowed).clamp_min(0.0)
    worst = (beyond / sizes.clamp_min(_SMALLEST * float(sizes.norm()) + 1e-12)).max()
    return Check(float(worst), _GRADIENTS[half], "gradients of a plain run")


def loss_of(out: Tensor) -> Tensor:
    """The loss of a timed training step."""
    return out.float().square().mean()


def _gradients(forward: Forward, model: nn.Module) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(forward()).backward()  # type: ignore[no-untyped-call]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def _distances(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.double() - y.double()).norm() for x, y in zip(some, others, strict=True)])
