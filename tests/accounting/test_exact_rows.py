"""The exact accounting of whole models: rows, what they are attributed to, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from small_models import executed, pvt
from torch import Tensor, nn

import ecoformer
from ecoformer.accounting.exact import exact_rows
from ecoformer.hashing import Hasher
from ecoformer.models.text import TextEncoder
from ecoformer.operations import Counts

IMAGE = (2, 3, 64, 64)


def _total(rows: list[tuple[str, str, Any, Counts]]) -> Counts:
    return sum((counts for *_, counts in rows), Counts())


CONFIGS: dict[str, dict[str, Any]] = {
    "eco": {"local": (3, 3)},
    "bi_eco": {"bits": 8},
    "performer": {"features": 8},
    "linformer": {"k": 8},
    "reformer": {"bucket_size": 8},
}


@pytest.mark.parametrize("attention", ecoformer.list_attentions())
def test_rows_of_a_model_are_what_a_real_run_executes(attention: str) -> None:
    model = pvt(attention, **CONFIGS.get(attention, {}))
    rows, uncounted = exact_rows(model, IMAGE)
    for hasher in (m for m in model.modules() if isinstance(m, Hasher)):
        hasher.fitted.fill_(True)
    assert uncounted == []
    assert (_total(rows), ()) == executed(model.eval(), torch.randn(IMAGE))


def test_rows_of_modules_are_what_the_modules_execute_alone() -> None:
    model = pvt("eco")
    by_name = {name: (kind, part, counts) for name, kind, part, counts in exact_rows(model, IMAGE)[0]}
    name = "stages.1.blocks.1.attn.attention"
    assert by_name[name][:2] == ("eco", "attention")
    within = [counts for n, (_, part, counts) in by_name.items() if f"{n}.".startswith(f"{name}.")]
    assert sum(within, Counts()) == _total(exact_rows(model.get_submodule(name), (2, 64, 16))[0])
    fc1 = by_name["stages.0.blocks.0.mlp.fc1"]
    rows, products = 2 * 256, 2 * 256 * 8 * 16
    moved = 4 * (rows * 8 + 8 * 16 + 16 + rows * 16)
    assert fc1 == ("Linear", "ffn", Counts(mul=products, add=products + rows * 16, bytes=moved))


def test_sums_of_residual_branches_belong_to_the_block() -> None:
    rows, _ = exact_rows(pvt("eco"), IMAGE)
    block = next(row for row in rows if row[0] == "stages.0.blocks.0")
    numbers = 2 * 16 * 16 * 8
    assert block == ("stages.0.blocks.0", "Block", "other", Counts(add=2 * numbers, bytes=24 * numbers))


def test_the_model_is_left_as_it_was() -> None:
    model = pvt("eco").train()
    model.get_submodule("head").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    exact_rows(model, IMAGE)
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.warns(UserWarning, match="fit_hashers"):
        model(torch.randn(IMAGE))


def test_an_error_in_the_model_leaves_it_as_it_was() -> None:
    model = pvt("eco").train()
    with pytest.raises(RuntimeError):
        exact_rows(model, (1, 5, 64, 64))
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class _Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).real + 1


def test_unknown_operators_are_listed_with_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Spectrum())
    rows, uncounted = exact_rows(model, (2, 4))
    assert uncounted == ["1 (aten._fft_r2c)"]
    assert [name for name, *_ in rows] == ["0", "1"]


def test_inputs_of_other_kinds() -> None:
    linear = nn.Linear(4, 4)
    expected = exact_rows(linear, (2, 4))
    assert exact_rows(linear, torch.zeros(2, 4)) == expected
    assert exact_rows(linear, {"input": torch.zeros(2, 4)}) == expected
    half, _ = exact_rows(nn.Linear(4, 4).bfloat16(), (2, 4))
    assert _total(half).bytes * 2 == _total(expected[0]).bytes


def test_text_encoder() -> None:
    model = TextEncoder(attention="eco", dim=16, num_heads=2, depth=1, hidden=32, length=20)
    rows, uncounted = exact_rows(model, torch.zeros(2, 20, dtype=torch.int64))
    assert uncounted == []
    assert _total(rows).lookup == 2 * 20 * 16


NAMES = ["pvt_v2_b0", "vit_tiny_patch16_224", "resnet18", "ecoformer_twins_svt_small"]


@pytest.mark.parametrize("name", NAMES)
def test_known_models_have_nothing_uncounted(name: str) -> None:
    rows, uncounted = exact_rows(timm.create_model(name), (1, 3, 224, 224))
    assert uncounted == []
    assert _total(rows).mul > 10**8
