"""Compiled contestants run what was compiled for them, however many they are."""

import pytest
import torch

from ecoformer.backends.choice import asked_for, use_backend
from ecoformer.benchmarking.compiling import compiled
from ecoformer.benchmarking.models import Load, bench_models
from ecoformer.benchmarking.operators import Setting, build_layer, operators_of
from ecoformer.models.text import TextEncoder

CPU = torch.device("cpu")


@pytest.fixture
def compilations(monkeypatch):
    """How often a compiler that is quicker than PyTorch's was called."""
    calls = []

    def backend(module, example):
        calls.append(module)
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, dynamic: compile_(call, dynamic=dynamic, backend=backend)
    )
    yield calls
    torch.compiler.reset()


def test_each_keeps_its_backend(compilations):
    def call(x):
        return x + {"eager": 1, "cpu": 2}[asked_for()]

    results = []
    for name in ("eager", "cpu"):
        run = compiled(call)
        with use_backend(name):
            results.append(run(torch.zeros(1)).item())
    assert results == [1, 2]


def test_more_than_eight(compilations):
    for width in range(1, 12):
        compiled(torch.nn.Linear(2, width))(torch.ones(1, 2))
    assert len(compilations) == 11


def test_contestants_have_code_of_their_own(monkeypatch):
    codes = []
    monkeypatch.setattr(torch, "compile", lambda call, dynamic: codes.append(call.__code__) or call)
    model = TextEncoder(attention="softmax", vocabulary=30, length=40, dim=16, hidden=8, depth=1).eval()
    load = Load(lambda count: torch.ones(count, 40, dtype=torch.int64), "tokens", {}, compiled=True)
    bench_models(model, ["performer"], load, [1, 2], CPU, seconds=0.001)
    for tokens in (40, 50):
        setting = Setting((1, 1, tokens, 8), torch.float32, CPU, compiled=True)
        operators_of(build_layer("eco", setting), setting)
    assert len(set(map(id, codes))) == len(codes) == 6
