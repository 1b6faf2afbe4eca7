"""What benchmarks meet in tests: one backend, and little garbage."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_left_alone():
    """Collecting garbage before memory is measured takes long among all that tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_backend(request, monkeypatch):
    """Whatever others this machine has."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("ecoformer.backends.available", lambda device: ["eager"], raising=False)
