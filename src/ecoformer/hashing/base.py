"""The interface of hashers: tokens (B, H, N, D) to codes (B, H, N, b), learned or drawn for each head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from ecoformer.arguments import shape
from ecoformer.hashing.solver import FitOptions
from ecoformer.operations import Described
from ecoformer.ops.eager import full_precision, widened
from ecoformer.randomness import seeded

NOT_FITTED = "hash functions are random, not fitted: ecoformer.fit_hashers(model, batches) learns them"


class Hasher(Described, nn.Module):
    """Hash functions of one attention layer.

    A hasher computes a real number for every bit (`project`), whose sign is the bit. Hash functions are
    random (`draw`) until they are learned (`fit`); a hasher that runs before that warns once. All state is in
    buffers, `fitted` included, so it is saved, loaded and moved with the module.

    Args:
        num_heads: heads; each has its own hash functions.
        head_dim: D, channels of a head.
        bits: b, length of a code.
    """

    computed_by = "project"
    learns: ClassVar[bool] = True
    fitted: Tensor

    def __init__(self, num_heads: int, head_dim: int, bits: int = 16) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("bits", bits)):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_heads, self.head_dim, self.bits = num_heads, head_dim, bits
        self.register_buffer("fitted", torch.tensor(False))
        self._may_be_random = True

    def draw(self, generator: torch.Generator) -> None:
        """Set the buffers to random hash functions."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new hash functions; without a generator, they follow `torch.manual_seed`."""
        if not self.fitted.is_meta:
            self.draw(seeded(None) if generator is None else generator)
            self.fitted.fill_(not self.learns)
        self._look_again()

    def project(self, tokens: Tensor) -> Tensor:
        """Real numbers (B, H, N, b) whose signs are the codes of tokens (B, H, N, D)."""
        raise NotImplementedError

    def learn(
        self, tokens: Tensor, valid: Tensor | None, generator: torch.Generator, options: FitOptions
    ) -> None:
        """Set the buffers from finite tokens (B, H, N, D) in fp32 or fp64, zero where they are padding."""
        raise NotImplementedError

    def encode(self, tokens: Tensor) -> Tensor:
        """What `hash_attention` takes: numbers (B, H, N, b), or packed codes where no gradient is wanted."""
        return self.project(tokens)

    def codes(self, tokens: Tensor) -> Tensor:
        """Codes (B, H, N, b) of ±1 in fp32, or fp64 for fp64."""
        y = self.project(widened(tokens))
        return torch.where(y >= 0, 1.0, -1.0).to(y.dtype)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`encode` in fp32, or fp64 for fp64.

        `key_padding_mask` (B, N), True for padding, changes no codes: it is there for `fitting`.
        """
        self._check(tokens, key_padding_mask)
        self.warn_if_random()
        # Codes depend on the sign of small differences, which half precision would flip.
        with full_precision(tokens.device):
            return self.encode(widened(tokens))

    @torch.no_grad()
    def fit(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        seed: int = 0,
        options: FitOptions | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Learn the hash functions from tokens (B, H, N, D); returns the hasher itself.

        Args:
            tokens: what the layer hashes. Attention scores are those within a sample.
            key_padding_mask: (B, N), True for padding, which is ignored.
            seed: the same seed and samples give the same result, in any order and on any number of ranks.
            options: how to learn, see `FitOptions`.
            group: process group whose ranks each hold some of the samples; all learn from all.
        """
        self._check(tokens, key_padding_mask)
        tokens = widened(tokens.detach())
        valid = None if key_padding_mask is None else ~key_padding_mask
        if group is not None:
            tokens, valid = _gather_tokens(tokens, valid, group)
        if valid is not None:
            tokens = tokens.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite(tokens)
        tokens, valid = _sorted_samples(tokens, valid)
        with full_precision(tokens.device):
            self.learn(tokens, valid, seeded(seed), options or FitOptions())
        self.fitted.fill_(True)
        self._may_be_random = False
        if group is not None:
            _broadcast_state(self, group)
        return self

    @property
    def is_fitted(self) -> bool:
        """Whether the hash functions are what they should be: learned, or random by design."""
        return not self.fitted.is_meta and bool(self.fitted)

    def warn_if_random(self) -> None:
        """Warn, once for all hashers of a model, if hash functions should have been learned and were not."""
        if self._may_be_random and _warn_if_random(self.fitted) and not torch.compiler.is_compiling():
            # Reading the buffer in every call would stall a GPU.
            self._may_be_random = False

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}, bits={self.bits}"
        return f"{sizes}, fitted={'meta' if self.fitted.is_meta else self.is_fitted}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the hash functions in fp32 in a half-precision model: rounded, they would give other codes.

        Every way to move or cast a module ends here, and nothing else sees them all.
        """
        was_meta = self.fitted.is_meta

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        super()._apply(keep_wide, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.fitted.is_meta:  # `to_empty`: the memory holds no hash functions yet
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._look_again()

    def _look_again(self) -> None:
        """The hash functions were replaced: read `fitted` now, or in the next call if it has no value yet."""
        self._may_be_random = not self.is_fitted
        if self._may_be_random:
            _unwarned.add(NOT_FITTED)

    def _check(self, tokens: Tensor, key_padding_mask: Tensor | None) -> None:
        if tokens.ndim != 4 or (tokens.shape[1], tokens.shape[3]) != (self.num_heads, self.head_dim):
            raise ValueError(f"tokens must be (B, {self.num_heads}, N, {self.head_dim}), got {shape(tokens)}")
        if not tokens.is_floating_point():
            raise TypeError(f"tokens must be floating point, got {tokens.dtype} {shape(tokens)}")
        wanted = (tokens.shape[0], tokens.shape[2])
        mask = key_padding_mask
        if mask is not None and (mask.dtype != torch.bool or mask.shape != wanted):
            raise ValueError(
                f"key_padding_mask must be bool (B, N) = {wanted}, got {mask.dtype} {shape(mask)}"
            )

    def _check_finite(self, tokens: Tensor) -> None:
        broken = int((~tokens.square().sum(dim=-1).isfinite()).flatten(1).any(dim=1).sum())
        if broken:
            raise ValueError(
                f"tokens {shape(tokens)} have NaN, infinity or lengths that overflow {tokens.dtype} in "
                f"{broken} of {len(tokens)} samples"
            )


_unwarned: set[str] = set()
"""The warning that the next random hasher gives, for all hashers that exist by then."""


def _warn_if_random(fitted: Tensor) -> bool:
    """Warn unless the flag is set; returns whether it could be read."""
    readable = type(fitted) is Tensor and not fitted.is_meta
    if _unwarned and readable and not bool(fitted):
        warnings.warn(_unwarned.pop(), stacklevel=3)
    return readable


def wide_dtype() -> torch.dtype:
    """The default dtype, or fp32 where that is half precision."""
    default = torch.get_default_dtype()
    return torch.float32 if default.itemsize < 4 else default


def _sorted_samples(tokens: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Samples (B, H, N, D) in an order that depends on their content alone.

    Ranks hold the samples of a batch in another order than one process; random draws must not depend on it.
    """
    _, heads, n, dim = tokens.shape
    position = torch.arange(n, dtype=torch.float64, device=tokens.device).cos()
    channel = torch.arange(heads * dim, dtype=torch.float64, device=tokens.device).cos().view(heads, dim)
    order = torch.einsum("bhnd,n,hd->b", tokens.double(), position, channel).argsort(stable=True)
    return tokens[order], None if valid is None else valid[order]


def _gather_tokens(
    tokens: Tensor, valid: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """All ranks' samples (B, H, N, D), padded to the longest; ranks may differ in B and in N."""
    batch, _, n, _ = tokens.shape
    own = torch.tensor([batch, n, int(valid is not None)], device=tokens.device)
    sizes = _all_gather(own, group)
    most, longest, masked = torch.stack(sizes).amax(dim=0).tolist()
    if valid is None:
        valid = tokens.new_ones(batch, n, dtype=torch.bool)
    tokens = F.pad(tokens, (0, 0, 0, longest - n, 0, 0, 0, most - batch))
    present = F.pad(valid.to(torch.uint8), (0, longest - n, 0, most - batch))
    counts = [int(size[0]) for size in sizes]
    tokens, present = (
        torch.cat([x[:count] for x, count in zip(_all_gather(part, group), counts, strict=True)])
        for part in (tokens, present)
    )
    ragged = bool(masked) or any(int(size[1]) != longest for size in sizes)
    return tokens, present.bool() if ragged else None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


def _broadcast_state(hasher: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's tensors: devices may round differently."""
    first = dist.get_global_rank(group, 0)
    for tensor in hasher.state_dict().values():
        if tensor.dtype != torch.bool:
            dist.broadcast(tensor, src=first, group=group)
