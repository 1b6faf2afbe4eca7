"""The backends of hashed attention that can run here, and how one of them is forced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ecoformer import backends

VARIABLE = "ECOFORMER_BACKEND"


def hashed_backends(device: torch.device) -> list[str]:
    """Names of the backends that run on `device`."""
    listed = getattr(backends, "available", None)
    return ["eager"] if listed is None else list(listed(device))


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Hashed attention by the backend `name`, whatever would be chosen."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
