"""Set-up shared by all tests: one thread each, and repeatable hypothesis.

`pytest --hypothesis-profile=thorough` looks at many more examples, other ones each time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings

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
