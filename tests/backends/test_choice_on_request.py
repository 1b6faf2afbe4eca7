import pytest
import torch

from ecoformer.backends import choice, fused


@pytest.fixture
def able(monkeypatch):
    """Both a backend that is chosen and one that must be asked for can run."""
    monkeypatch.delenv("ECOFORMER_BACKEND", raising=False)
    monkeypatch.setattr(choice, "PREFERRED", {"cpu": ("triton", "cpu")})
    monkeypatch.setattr(choice, "_cannot", lambda name, *rest: None)
    monkeypatch.setattr(choice, "cannot_on", lambda name, device: None)


def picked():
    x = torch.zeros(1, 1, 4, 16)
    return choice.pick(x, None, x, None, fused.Hyperplanes(torch.zeros(1, 16, 8)), False, False)


def test_a_backend_on_request_waits_to_be_asked(able, monkeypatch):
    assert "triton" in choice.ON_REQUEST
    assert picked() == "cpu"
    monkeypatch.setenv("ECOFORMER_BACKEND", "triton")
    assert picked() == "triton"


def test_it_is_listed_after_those_that_are_chosen(able):
    assert choice.available("cpu") == ["cpu", "eager", "triton"]
