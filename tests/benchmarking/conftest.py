"""Benchmarks in tests: one backend, and little garbage collection."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _little_garbage(old_objects_left_alone):
    """In every benchmark."""


@pytest.fixture(autouse=True)
def _one_backend(request, monkeypatch):
    """Whatever other backends this machine has."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("ecoformer.benchmarking.contestants.available", lambda device: ["eager"])
