"""Operations by the width of their operands, and what each width costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from small_models import executed, pvt
from torch import Tensor, nn

import ecoformer
from ecoformer.accounting import energy_table
from ecoformer.accounting.operators import hashed_attention
from ecoformer.bitfusion import simulate_model
from ecoformer.operations import Counts

X = torch.ones(3, 4)
OURS = torch.ops.ecoformer
BYTES, WORDS = X.to(torch.int8), X.to(torch.int32)

WIDTHS: dict[str, tuple[Callable[[], Any], dict[str, Counts]]] = {
    "fp64": (lambda: X.double() * 2, {"fp32": Counts(mul=12)}),
    "fp16": (lambda: X.half() + X.half(), {"fp16": Counts(add=12)}),
    "bf16": (lambda: X.bfloat16() @ X.bfloat16().t(), {"bf16": Counts(mul=36, add=36)}),
    "fp16 and a scalar of fp32": (lambda: X.half() * torch.tensor(2.0), {"fp16": Counts(mul=12)}),
    "fp16 and fp32": (lambda: X.half() * X, {"fp32": Counts(mul=12)}),
    "int8": (lambda: BYTES + BYTES, {"int8": Counts(add=12)}),
    "int16": (lambda: BYTES.to(torch.int16) * 3, {"int16": Counts(mul=12)}),
    "int64": (lambda: WORDS.long() + 1, {"int32": Counts(add=12)}),
    "a sum of int8": (lambda: BYTES.sum(dim=0), {"int32": Counts(add=12)}),
    "integers become numbers": (lambda: WORDS * X, {"fp32": Counts(mul=12)}),
    "rows of a table": (lambda: X.half()[torch.tensor([0, 2])], {"fp16": Counts(lookup=8)}),
    "numbers become int8": (
        lambda: (X / 3).round().clamp(-127, 127).to(torch.int8),
        {"fp32": Counts(mul=12, compare=24)},
    ),
    "attention": (
        lambda: nn.functional.scaled_dot_product_attention(*[X.half()[None, None]] * 3),
        {"fp16": Counts(mul=72, add=72, exp=9)},
    ),
    "products of int8": (
        lambda: torch._int_mm(BYTES, BYTES.t()),
        {"int8": Counts(mul=36), "int32": Counts(add=36)},
    ),
}


@pytest.mark.parametrize(("call", "widths"), WIDTHS.values(), ids=WIDTHS)
def test_every_operator_has_a_width(call: Callable[[], Any], widths: dict[str, Counts]) -> None:
    counts, uncounted = executed(call)
    assert (counts.widths, uncounted) == (widths, ())


def test_counts_add_up_width_by_width() -> None:
    counts = Counts(mul=2, bytes=8).of("int8") * 3 + Counts(add=1).of("int32") + Counts(mul=1) + mixed()
    assert counts == Counts(mul=9, add=3, bytes=24)
    assert counts.widths == {"fp32": Counts(mul=1, add=2), "int8": Counts(mul=8), "int32": Counts(add=1)}
    assert Counts(mul=1).of("int8").of("fp32").widths == {"fp32": Counts(mul=1)}
    assert Counts(bytes=3).of("int8").widths == {}


def mixed() -> Counts:
    return Counts(mul=2).of("int8") + Counts(add=2)


@pytest.mark.parametrize("memory", ["", "-sram"])
@pytest.mark.parametrize("process", ["45nm", "7nm"])
def test_without_a_width_every_operation_pays_its_own_price(process: str, memory: str) -> None:
    table = energy_table(process + memory)
    for width in ("fp32", "fp16", "int32", "int8"):
        counts = Counts(mul=10, add=20, shift=3, bytes=5)
        assert table.energy_pj(counts.of(width)) == energy_table(f"{width}-{process}{memory}").energy_pj(
            counts
        )
    counts = Counts(mul=10, bytes=4).of("int8") + Counts(add=10).of("int32") + Counts(add=5)
    prices = [table.widths["int8"]["mul"], table.widths["int32"]["add"], table.pj["add"] / 2]
    assert table.energy_pj(counts) == pytest.approx(10 * sum(prices) + 4 * table.pj.get("bytes", 0))
    assert energy_table(f"fp32-{process}").energy_pj(counts) == energy_table(f"fp32-{process}").energy_pj(
        Counts(mul=10, add=15)
    )


def test_widths_without_figures_pay_those_of_wider_ones() -> None:
    old, new = energy_table("45nm"), energy_table("7nm")
    assert (old.widths["int16"], old.widths["bf16"]) == (old.widths["int32"], old.widths["fp32"])
    assert new.widths["bf16"] == energy_table("bf16-7nm").pj
    assert old.source.endswith("; int16 at most as int32; bf16 at most as fp32")
    assert new.source.endswith("; int16 at most as int32")
    assert energy_table({"mul": 2, "add": 1}).energy_pj(Counts(mul=3).of("int8")) == 6


def test_fp32_models_cost_the_same_with_and_without_a_width() -> None:
    one, every = (
        ecoformer.cost(pvt("eco"), (1, 3, 64, 64), accounting="exact", energy=name)
        for name in ("fp32-45nm-dram", "45nm-dram")
    )
    assert one.energy_pj == every.energy_pj
    assert list(every.to_dict()["widths"]) == ["fp32"]
    assert " (M): fp32" not in str(every)


class _Integer(nn.Module):
    """A linear layer of int8 numbers and its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x / 3).round().clamp(-127, 127).to(torch.int8)
        return torch._int_mm(numbers, numbers.t()) * 0.5


def test_a_ledger_says_how_operations_divide_by_width() -> None:
    ledger = ecoformer.cost(_Integer(), (32, 64), accounting="exact", energy="45nm-sram")
    terms, inputs, outputs = 32 * 32 * 64, 32 * 64, 32 * 32
    widths = {
        "fp32": {"mul": inputs + outputs, "compare": 2 * inputs},
        "int8": {"mul": terms},
        "int32": {"add": terms},
    }
    facts = json.loads(ledger.to_json())
    assert facts["widths"] == facts["layers"][0]["widths"] == ledger.summary()["widths"] == widths
    assert facts["energy"]["widths"]["int8"]["mul"] == 0.2
    pj = 3.7 * (inputs + outputs) + 0.2 * terms + 0.1 * terms + 1.25 * ledger.total.bytes
    assert ledger.energy_pj == pytest.approx(pj)
    assert facts["layers"][0]["energy_pj"] == pytest.approx(pj)
    text = str(ledger)
    assert "\nmul (M): fp32 0.00307, int8 0.0655\nadd (M): int32 0.0655\n" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "int8" not in ledger.to_csv()


def meta(*size: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def test_operators_of_whole_numbers() -> None:
    image, weight = meta(1, 4, 6, 6), meta(8, 2, 3, 3)
    counts, _ = executed(OURS.integer_conv2d, image, weight, [1, 1], [1, 1], 2)
    terms = 8 * 16 * 2 * 9
    assert counts.widths == {"int8": Counts(mul=terms), "int32": Counts(add=terms)}
    assert counts.bytes == 4 * 36 + 8 * 2 * 9 + 4 * 8 * 16
    counts, _ = executed(OURS.pack_signs, meta(5, 32, dtype=torch.int32), meta(32, dtype=torch.int32), 16)
    assert counts == Counts(compare=5 * 32, bytes=4 * (5 * 32 + 32) + 2 * 5 * 2)
    codes, v = meta(2, 3, 100, dtype=torch.int16), meta(2, 3, 100, 32)
    levels, multiplier = meta(3, 4, 5, dtype=torch.int32), meta(3, 2, dtype=torch.int32)
    counts, uncounted = executed(
        OURS.integer_attention, codes, codes, v, levels, multiplier, meta(2, 3, 100), None
    )
    assert uncounted == ()
    assert counts.widths == {"int32": hashed_attention(100, 100, 32, 4, 4, weighted=True) * 6}
    assert counts.bytes == 2 * 600 * 2 + 2 * 600 * 32 + 600 + 4 * (3 * 4 * 5 + 3 * 2)


@pytest.mark.parametrize(
    ("layer", "example"), [(nn.Linear(64, 32), (2, 9, 64)), (nn.Conv2d(3, 8, 3), (2, 3, 9, 9))]
)
def test_only_ends_and_weights_of_integer_layers_reach_memory(layer: nn.Module, example: Any) -> None:
    model = nn.Sequential(layer)
    before = ecoformer.cost(model, example, accounting="exact").total
    ecoformer.quantize(model, [torch.randn(example)], progress=False)
    after = ecoformer.cost(model, example, accounting="exact").total
    weights, channels = layer.weight.numel(), len(layer.weight)
    scales = 4 * channels  # beside biases, which have 32 bits in both
    assert before.bytes - after.bytes == 3 * weights - scales
    assert after.widths["int8"].mul == before.mul


@pytest.mark.filterwarnings("ignore:.*hash functions")
@pytest.mark.parametrize("attention", ["softmax", "eco", "sharp_eco"])
def test_quantised_models(attention: str) -> None:
    model, image = pvt(attention).eval(), (1, 3, 64, 64)
    before = [ecoformer.cost(model, image, accounting=how, energy="45nm") for how in ("paper", "exact")]
    cycles = simulate_model(model, image)
    ecoformer.quantize(model, [torch.randn(image)], max_error=float("inf"), progress=False)
    after = [ecoformer.cost(model, image, accounting=how, energy="45nm") for how in ("paper", "exact")]
    assert after[0].total == before[0].total
    assert after[1].uncounted == ()
    assert after[1].energy_pj < before[1].energy_pj
    widths = after[1].total.widths
    assert widths["int32"].add > widths["int8"].mul > before[1].total.mul / 4
    found = simulate_model(model, image)
    assert (found.macs, found.uncounted) == (cycles.macs, ())
    assert found.total.cycles == cycles.total.cycles
    assert after[1].total.bytes < before[1].total.bytes


def test_quantised_attention_of_other_libraries_is_known_to_bitfusion() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    cycles = simulate_model(model, (1, 3, 32, 32))
    ecoformer.quantize(model, [torch.randn(1, 3, 32, 32)], max_error=float("inf"), progress=False)
    found = simulate_model(model, (1, 3, 32, 32))
    assert (found.total, found.uncounted) == (cycles.total, ())
