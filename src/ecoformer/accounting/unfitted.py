"""Hashers that have learned nothing yet can be counted: what they have learned changes no count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ecoformer.hashing import Hasher


@contextmanager
def taken_for_fitted(hashers: Iterable[Hasher]) -> Iterator[None]:
    """Hashers pass for fitted, and are again what they were afterwards."""
    before = {hasher: hasher._known_fitted for hasher in hashers}
    for hasher in before:
        hasher._known_fitted = True
    try:
        yield
    finally:
        for hasher, fitted in before.items():
            hasher._known_fitted = fitted
