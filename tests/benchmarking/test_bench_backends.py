"""Rows are named after the backend that computes them: one that would leave it to eager has no row."""

import pytest
import torch

from ecoformer.attention.registry import create_attention
from ecoformer.benchmarking.attention import bench_attention
from ecoformer.benchmarking.backends import hashed_backends
from ecoformer.benchmarking.operators import Setting

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_backend():
    """Here all that the machine has."""


def rows(mechanism, backward):
    setting = Setting((1, 1, 32, 16), torch.float32, CPU, backward=backward)
    run = bench_attention([setting], (mechanism,), seconds=0.01, memory=False)
    return [row.backend for row in run.rows if row.mechanism == mechanism]


@pytest.mark.parametrize(
    ("mechanism", "backward", "expected"),
    [
        ("eco", False, ["cpu", "eager"]),
        ("lsh_eco", False, ["cpu", "eager"]),
        ("eco", True, ["eager"]),
        ("bi_eco", False, ["eager"]),
    ],
)
def test_contestants(mechanism, backward, expected):
    pytest.importorskip("numba")
    assert rows(mechanism, backward) == expected


def test_all_layers_of_a_model_must_run():
    pytest.importorskip("numba")
    hashers = [create_attention(name, 16, 1).hasher for name in ("lsh_eco", "bi_eco")]
    assert hashed_backends(hashers[:1], CPU, False) == ["cpu", "eager"]
    assert hashed_backends(hashers, CPU, False) == ["eager"]
