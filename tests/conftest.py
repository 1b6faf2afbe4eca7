"""Set-up shared by all tests: one thread each, repeatable hypothesis, and factories of inputs.

`pytest --hypothesis-profile=thorough` looks at many more examples, other ones each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from ecoformer import reference
from ecoformer.third_party import repair_torchvision

torch.set_num_threads(1)
repair_torchvision()
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1500)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr("socket.socket.connect", forbidden)
    monkeypatch.setattr("socket.getaddrinfo", forbidden)


class Inputs(NamedTuple):
    codes_q: Tensor
    codes_k: Tensor
    v: Tensor

    def to(self, *args: Any) -> Inputs:
        return Inputs(*(x.to(*args) for x in self))

    def requires_grad(self) -> Inputs:
        return Inputs(*(x.detach().clone().requires_grad_() for x in self))

    def gradients(self, out: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * weight).sum(), self, allow_unused=True, materialize_grads=True)


def _codes(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(dtype)


def _inputs(
    *lead: int,
    n: int = 9,
    n_k: int | None = None,
    dim: int = 5,
    bits: int = 16,
    dtype: torch.dtype = torch.float64,
    whole: bool = False,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    keys = n if n_k is None else n_k
    q = _codes(generator, *lead, n, bits, dtype=dtype)
    k = _codes(generator, *lead, keys, bits, dtype=dtype)
    if whole:
        v = torch.randint(-100, 101, (*lead, keys, dim), generator=generator).to(dtype)
    else:
        v = torch.randn(*lead, keys, dim, generator=generator, dtype=torch.float64).to(dtype)
    return Inputs(q, k, v)


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., Inputs]:
    """Factory of (codes_q, codes_k, v) with shapes (*lead, n, ·); `whole` makes v integer-valued."""
    return _inputs


@pytest.fixture(scope="session")
def make_mask() -> Callable[..., Tensor]:
    """Factory of key padding masks (*lead, n): random, with the first sample padded as a whole."""

    def mask(*shape: int, seed: int = 0, share: float = 0.4) -> Tensor:
        padded = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
        padded[(0,) * (padded.ndim - 1)] = True
        return padded

    return mask


@pytest.fixture(scope="session")
def ground_truth() -> Callable[..., Tensor]:
    """`reference.hash_attention` in fp64 whatever the inputs' dtype; padded tokens may hold anything."""

    def truth(
        q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if key_padding_mask is not None:
            k, v = (x.masked_fill(key_padding_mask.unsqueeze(-1), 0) for x in (k, v))
        return reference.hash_attention(q.double(), k.double(), v.double(), key_padding_mask, **options)

    return truth
