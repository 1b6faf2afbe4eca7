"""The exact accounting of a model whose hashed attention is computed by the CPU kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from small_models import pvt
from torch import Tensor, nn

import ecoformer
from ecoformer.accounting import Ledger
from ecoformer.accounting.cpu_kernels import code_counts, kernel_counts
from ecoformer.accounting.energy import energy_table
from ecoformer.attention import Attention, HashedAttention
from ecoformer.hashing import KernelHasher
from ecoformer.operations import Counts

IMAGE = (2, 3, 64, 64)
TOKENS = (2, 20, 12)


def _exact(model: nn.Module, example: Any, backend: Any = None) -> Ledger:
    return ecoformer.cost(model, example, accounting="exact", backend=backend)


def _own(ledger: Ledger, name: str) -> Counts:
    return next(row.counts for row in ledger.rows if row.name == name)


def _layers(model: nn.Module) -> dict[str, Attention]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}


@pytest.mark.parametrize("attention", ["eco", "klsh_eco", "lsh_eco"])
@pytest.mark.parametrize("local", [0, (3, 3)])
def test_layers_are_their_formulas_and_nothing_else_changes(attention: str, local: Any) -> None:
    model = pvt(attention, bits=9, local=local)
    eager, fused = _exact(model, IMAGE), _exact(model, IMAGE, "cpu")
    tokens = {"stages.0": 256, "stages.1": 64, "stages.2": 16}
    hashed = [name for name, layer in _layers(model).items() if isinstance(layer, HashedAttention)]
    assert len(hashed) == 4
    for name in hashed:
        layer, n = model.get_submodule(name), tokens[name[:8]]
        branch = Counts(add=2 * n * layer.dim, bytes=12 * 2 * n * layer.dim) if local else Counts()
        assert _own(fused, name) == kernel_counts(layer, 2, n) + branch
    others = [
        [row for row in ledger.rows if not row.name.startswith(tuple(hashed))] for ledger in (eager, fused)
    ]
    assert others[0] == others[1]
    assert (fused.backend, fused.refused, fused.uncounted) == ("cpu", (), ())


def test_few_additions_where_the_paper_has_32_per_channel() -> None:
    counts = code_counts(ecoformer.EcoAttention(32, 1), 1, 3136)
    assert 3 < counts.add / (3136 * 32) < 4
    assert counts.lookup == 4 * 3136 * 32


@pytest.mark.parametrize("bias", ["paper", "tight"])
def test_every_bias_is_its_formula(bias: Any) -> None:
    layer = ecoformer.EcoAttention(64, 2, bias=bias)
    ledger = _exact(layer, (1, 100, 64), "cpu")
    assert _own(ledger, "") == kernel_counts(layer, 1, 100)
    assert ledger.total.mul == 1_604_710


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: ecoformer.create_attention("softmax", 4, 2)]
)
def test_other_layers_are_counted_as_before(make: Any) -> None:
    model, shape = make(), (2, 5, 4)
    assert _exact(model, shape, "cpu").rows == _exact(model, shape).rows
    assert _exact(model, shape, "cpu").refused == ()


class _Own(ecoformer.EcoAttention):
    name = "own"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        return super().attend(q, k, v, mask, is_causal) * 2


def test_counts_of_groups_of_bits() -> None:
    layer = ecoformer.create_attention("sharp_eco", 32, 1)
    tokens, wide = 100, 33  # the values' 32 channels and their weight, in rows of 32 + 1
    signs = Counts(compare=2 * 2 * 16) * tokens
    written = Counts(lookup=4 * 32, add=4 * wide, mul=32) * tokens
    fold = Counts(add=4 * 16 * wide)
    mixed = (Counts(mul=16 * wide) + Counts(mul=4 * 16 * wide, add=4 * 16 * wide)) * 4
    copied = Counts(mul=4 * 16 * 32)
    read = Counts(lookup=4 * 32, add=4 * wide, mul=32) * tokens
    moved = Counts(bytes=4 * tokens * (16 + 16 + 32 + 32 + 1))
    assert kernel_counts(layer, 1, tokens) == signs + written + fold + mixed + copied + read + moved
    eco = ecoformer.EcoAttention(32, 1)
    energy = energy_table("fp32-45nm").energy_pj
    assert energy(kernel_counts(layer, 1, 3136)) < energy(kernel_counts(eco, 1, 3136)) / 4


def _hooked() -> Attention:
    layer = ecoformer.EcoAttention(12, 3)
    layer.hasher.register_forward_hook(lambda module, args, out: out)
    return layer


def _replaced() -> Attention:
    layer = ecoformer.EcoAttention(12, 3)
    layer.attend = lambda q, k, v, mask, causal: v  # type: ignore[method-assign]
    return layer


REFUSED = {
    "the kernels do not support SignHasher": lambda: ecoformer.create_attention("bi_eco", 12, 3),
    "more than 64 bits": lambda: ecoformer.create_attention("lsh_eco", 12, 3, bits=65),
    "_Own overrides attend": lambda: _Own(12, 3),
    "its attend was replaced": _replaced,
    "its hash functions have hooks": _hooked,
    "the kernels compute in fp32": lambda: ecoformer.EcoAttention(12, 3).double(),
}


@pytest.mark.parametrize(("why", "make"), REFUSED.items(), ids=REFUSED)
def test_layers_that_the_kernels_refuse_are_counted_as_before_and_named(why: str, make: Any) -> None:
    model = nn.Sequential(make())
    eager, fused = _exact(model, TOKENS), _exact(model, TOKENS, "cpu")
    assert fused.rows == eager.rows
    assert len(fused.refused) == 1
    assert fused.refused[0].startswith("0 (")
    assert why in fused.refused[0]
    assert f"\ncounted as eager: {fused.refused[0]}" in str(fused)
    assert json.loads(fused.to_json())["refused"] == list(fused.refused)


class _Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ecoformer.EcoAttention(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, is_causal=True)
        return out


def test_causal_order_is_counted_as_before() -> None:
    fused = _exact(_Causal(), TOKENS, "cpu")
    assert fused.rows == _exact(_Causal(), TOKENS).rows
    assert fused.refused == ("attention (causal order has no formula)",)


def test_padding_counts_like_tokens_and_its_flags_are_read() -> None:
    layer = ecoformer.EcoAttention(12, 3)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    fused = _exact(layer, {"x": torch.zeros(TOKENS), "key_padding_mask": mask}, "cpu")
    assert _own(fused, "") == kernel_counts(layer, 2, 20) + Counts(bytes=40)


def test_half_precision_is_widened_for_the_kernels() -> None:
    wide = _exact(ecoformer.EcoAttention(12, 3), TOKENS, "cpu")
    half = _exact(ecoformer.EcoAttention(12, 3).bfloat16(), TOKENS, "cpu").total
    own = next(row for row in wide.rows if row.kind == "eco").counts.bytes
    assert (half.mul, half.add, half.lookup) == (wide.total.mul, wide.total.add, wide.total.lookup)
    widened = 3 * TOKENS[0] * TOKENS[1] * TOKENS[2] * (2 + 4)
    assert half.bytes == (wide.total.bytes - own) // 2 + own + widened


def test_numba_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert _exact(ecoformer.EcoAttention(12, 3), TOKENS, "cpu").total.lookup


def test_the_model_is_left_as_it_was() -> None:
    model = pvt("eco").train()
    _exact(model, IMAGE, "cpu")
    with pytest.raises(ValueError, match="cannot take an input"):
        _exact(model, (1, 5, 64, 64), "cpu")
    assert model.training
    for layer in _layers(model).values():
        assert "attend" not in layer.__dict__
    hashers = [module for module in model.modules() if isinstance(module, KernelHasher)]
    assert hashers
    assert not any(hasher._forward_hooks for hasher in hashers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cpu"}, "backend='cpu' needs accounting=\"exact\""),
        ({"backend": "eager", "accounting": "paper"}, "backend='eager' needs"),
        ({"backend": "triton", "accounting": "exact"}, 'backend must be "eager" or "cpu", got \'triton\''),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ecoformer.cost(nn.Linear(4, 4), (2, 4), **arguments)
