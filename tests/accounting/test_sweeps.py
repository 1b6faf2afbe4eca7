"""Sweeps: one setting changes, everything else stays."""

import pytest
import torch
from torch import nn

from ecoformer.accounting import cost, sweep
from ecoformer.models.text import TextEncoder

timm = pytest.importorskip("timm")


def pvt():
    with torch.device("meta"):
        return timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=10)


def text():
    return TextEncoder(attention="softmax", length=64, dim=16, hidden=8, classes=0)


def test_support_by_the_papers_letter():
    points = sweep(pvt, "m", (10, 25), mechanisms=["eco"], example=(1, 3, 64, 64))
    assert [(p.parameter, p.value, p.mechanism) for p in points] == [
        ("support", 10, "eco"),
        ("support", 25, "eco"),
    ]
    rows = 256 + 2 * 64 + 5 * 16  # tokens of all heads
    few, many = (p.ledger.total for p in points)
    assert many.mul - few.mul == rows * 15 * (2 + 16)
    assert many.add - few.add == rows * 15 * (2 * 32 + 16)


def test_resolution_of_several_mechanisms():
    points = sweep(pvt, "resolution", [64, 128], mechanisms=[None, "softmax", "linformer"], settings={})
    assert [(p.mechanism, p.value) for p in points] == [
        (name, value) for name in (None, "softmax", "linformer") for value in (64, 128)
    ]
    assert points[1].ledger.total == cost(pvt(), (1, 3, 128, 128)).total
    assert all(
        small.ledger.energy_pj < large.ledger.energy_pj
        for small, large in zip(points[::2], points[1::2], strict=True)
    )


def test_tokens_and_what_is_passed_on():
    points = sweep(
        text,
        "tokens",
        [8, 32],
        mechanisms=["lsh_eco"],
        settings={"bits": 4},
        accounting="exact",
        energy={"mul": 1, "add": 0},
    )
    assert [p.ledger.accounting for p in points] == ["exact", "exact"]
    assert [p.ledger.energy_pj for p in points] == [p.ledger.total.mul for p in points]
    assert next(m for m in points[0].ledger.rows if m.kind == "lsh_eco").counts.mul
    paper = sweep(text, "tokens", [8, 16], mechanisms=["lsh_eco"], settings={"bits": 4})
    assert paper[1].ledger.total == paper[0].ledger.total * 2


def test_bits_of_an_input_that_is_given():
    tokens = torch.zeros(1, 16, dtype=torch.long)
    points = sweep(text, "bits", [2, 4], mechanisms=["eco", "bi_eco"], example=tokens)
    assert [(p.mechanism, p.value) for p in points] == [("eco", 2), ("eco", 4), ("bi_eco", 2), ("bi_eco", 4)]
    assert points[0].ledger.total.add < points[1].ledger.total.add


def test_rows():
    points = sweep(pvt, "resolution", [64], mechanisms=[None, "eco"])
    rows = [point.to_dict() for point in points]
    assert rows[0]["attention"] == "native"
    assert rows[1] | {"resolution": 64, "attention": "eco", "uncounted": 0} == rows[1]
    assert 0 < rows[1]["attention_share"] < 1
    assert list(rows[0])[:4] == ["resolution", "attention", "mul", "add"]


@pytest.mark.parametrize(
    ("parameter", "values", "mechanisms", "settings", "message"),
    [
        (
            "bits",
            [8],
            ["eco", "softmax"],
            {},
            "'bits' of softmax; .* bi_eco, eco, klsh_eco, lsh_eco",
        ),
        ("m", [8], ["lsh_eco"], {}, "'support' of lsh_eco; .*: eco, klsh_eco"),
        (
            "bit",
            [8],
            ["eco"],
            {},
            r"unknown setting 'bit' of eco \(did you mean 'bits'\?\); choose from attn_drop",
        ),
        ("colour", [8], ["eco"], {}, "unknown setting 'colour' of eco; choose from attn_drop, bias, bits"),
        ("bits", [8], [None], {}, "name one"),
        ("bits", [8], ["ecoo"], {}, "did you mean 'eco'"),
        ("bits", [], ["eco"], {}, "at least one value"),
        ("bits", [8], ["eco"], {"bits": 4}, "cannot be set to 4 as well"),
        ("resolution", [0], ["eco"], {}, "resolution must be whole numbers from 1, got 0"),
        ("tokens", ["many"], ["eco"], {}, "tokens must be whole numbers from 1, got 'many'"),
    ],
)
def test_mistakes(parameter, values, mechanisms, settings, message):
    def never() -> nn.Module:
        raise RuntimeError("checks come before the model is built")

    with pytest.raises(ValueError, match=message):
        sweep(never, parameter, values, mechanisms=mechanisms, settings=settings)
