"""The exact accounting: single operators by hand, hashed attention by its definition, and whole models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import executed, pvt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ecoformer
from ecoformer.accounting.exact import count_operators, exact_rows
from ecoformer.accounting.operators import hashed_attention
from ecoformer.hashing import Hasher
from ecoformer.models.text import TextEncoder
from ecoformer.operations import Counts, paper_counts

X, Y, ROW, BIAS = torch.ones(3, 4), torch.ones(4, 5), torch.ones(1, 4), torch.ones(5)
NUMBERS = torch.arange(12).reshape(3, 4)
PICTURE = torch.ones(1, 2, 6, 6)
IMAGE = (2, 3, 64, 64)

BY_HAND: dict[str, tuple[Callable[[], Any], Counts]] = {
    "mm": (lambda: X @ Y, Counts(mul=60, add=60, bytes=4 * (12 + 20 + 15))),
    "addmm": (lambda: torch.addmm(BIAS, X, Y), Counts(mul=60, add=60, bytes=4 * (5 + 12 + 20 + 15))),
    "linear": (lambda: F.linear(X, Y.T, BIAS), Counts(mul=60, add=60, bytes=4 * (5 + 12 + 20 + 15))),
    "dot": (lambda: torch.dot(X[0], X[1]), Counts(mul=4, add=4, bytes=32)),
    "convolution": (
        lambda: F.conv2d(PICTURE, PICTURE[..., :3, :3]),
        Counts(mul=288, add=288, bytes=4 * 106),
    ),
    "mul": (lambda: X * X, Counts(mul=12, bytes=144)),
    "mul by a number": (lambda: X * 3, Counts(mul=12, bytes=96)),
    "div by a row": (lambda: X / ROW, Counts(mul=12, bytes=4 * 28)),
    "add in place": (lambda: X.clone().add_(ROW), Counts(add=12, bytes=96 + 4 * 28)),
    "sum": (lambda: X.sum(dim=0), Counts(add=12, bytes=64)),
    "sum to a scalar": (lambda: X.sum(), Counts(add=12, bytes=48)),
    "exp": (lambda: X.exp(), Counts(exp=12, bytes=96)),
    "gelu": (lambda: F.gelu(X), Counts(exp=12, bytes=96)),
    "softmax": (lambda: X.softmax(dim=1), Counts(exp=12, bytes=96)),
    "layer norm": (lambda: F.layer_norm(X, (4,)), Counts(mul=12, bytes=96)),
    "comparison": (lambda: X > 1, Counts(compare=12, bytes=48 + 12)),
    "where": (lambda: torch.where(NUMBERS > 5, X, 0.0), Counts(compare=24, bytes=96 + 12 + 12 + 96)),
    "amax": (lambda: X.amax(dim=1), Counts(compare=12, bytes=60)),
    "max pooling": (lambda: F.max_pool2d(PICTURE, 3), Counts(compare=72, bytes=4 * (72 + 8) + 64)),
    "index": (lambda: X[torch.tensor([0, 2])], Counts(lookup=8, bytes=32 + 16 + 32)),
    "embedding": (lambda: F.embedding(torch.tensor([1]), X), Counts(lookup=4, bytes=16 + 8 + 16)),
    "cat": (lambda: torch.cat([X, ROW]), Counts(bytes=4 * 32)),
    "cast": (lambda: X.half(), Counts(bytes=48 + 24)),
    "copy in place": (lambda: torch.empty(3, 4).copy_(ROW), Counts(bytes=16 + 48)),
    "zeros": (lambda: torch.zeros(3, 4), Counts(bytes=48)),
    "views": (lambda: X.view(4, 3).mT[1:].unsqueeze(0).expand(5, 2, 4), Counts()),
    "an expanded operand": (lambda: ROW.expand(3, 4) * 2, Counts(mul=12, bytes=16 + 48)),
    "overlapping windows": (lambda: X[0].unfold(0, 2, 1) * 2, Counts(mul=6, bytes=16 + 24)),
    "an unlisted operator": (lambda: torch.fft.fft(X), Counts(add=12, bytes=48 + 96)),
}


@pytest.mark.parametrize(("call", "counts"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(call: Callable[[], Any], counts: Counts) -> None:
    assert executed(call) == (counts, ())


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_softmax_attention_is_one_operator_in_every_kernel(backend: SDPBackend) -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    scores = 2 * 3 * 5 * 7
    with sdpa_kernel(backend):
        found = executed(F.scaled_dot_product_attention, q, k, v)
    assert found == (Counts(mul=8 * scores, add=8 * scores, exp=scores, bytes=4 * (240 + 336)), ())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert counter.get_total_flops() == 2 * found[0].mul


def test_counting_changes_no_result_and_leaves_nothing_behind() -> None:
    layer, x = ecoformer.create_attention("reformer", 12, 3).eval(), torch.randn(2, 10, 12)
    expected = layer(x)
    with torch.no_grad(), count_operators() as counting:
        counting.enter("a")
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
        counting.leave()
        X + X
    assert list(counting.counts) == ["a"]
    with pytest.raises(RuntimeError, match="shape"):
        executed(lambda: X @ X)
    assert torch.backends.mha.get_fastpath_enabled()
    assert (X + X).sum() == 24


def test_pytorchs_own_layers_take_no_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    counts, uncounted = executed(layer, torch.randn(2, 5, 8))
    assert uncounted == ()
    assert counts.mul > 2 * 5 * (4 * 64 + 2 * 128)


@torch.library.custom_op("test_exact::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def test_operators_of_others_are_listed_and_the_rest_is_counted() -> None:
    counts, uncounted = executed(lambda: twice(X + X))
    assert (counts.add, uncounted) == (12, ("test_exact.twice",))


def own(layer: nn.Module, example: Any) -> Counts:
    """What a layer computes itself, outside of projections and hash functions."""
    return next(row.counts for row in ecoformer.cost(layer, example, accounting="exact").rows if not row.name)


def test_hashed_attention_by_hand() -> None:
    n, channels, heads, groups, rows = 50, 8, 3, 4, 16
    width, tokens = channels + 1, 2 * heads * n
    key = query = Counts(lookup=groups * width, add=groups * width)
    mixing = Counts(mul=5, add=4) * (groups * rows * width)
    expected = (key + query + Counts(mul=width)) * tokens + mixing * (2 * heads)
    hash_functions = heads * (25 * (channels + 1 + 16) + 1)
    moved = Counts(bytes=4 * (3 * tokens * channels + hash_functions))
    assert own(ecoformer.EcoAttention(24, heads), (2, n, 24)) == expected + moved
    mask = torch.zeros(2, n, dtype=torch.bool)
    masked = own(ecoformer.EcoAttention(24, heads), {"x": torch.zeros(2, n, 24), "key_padding_mask": mask})
    assert masked == expected + moved + Counts(bytes=2 * n)


@pytest.mark.parametrize("settings", [{}, {"bits": 6, "groups": 3, "separate": False, "key_weights": False}])
def test_the_definition_is_what_the_mechanism_states(settings: dict[str, Any]) -> None:
    layer = ecoformer.create_attention("sharp_eco", 24, 3, **settings)
    found, stated = own(layer, (2, 50, 24)), paper_counts(layer.operations(2, 50))
    assert [getattr(found, kind) for kind in ("mul", "add", "shift")] == [
        stated.mul,
        stated.add,
        stated.shift,
    ]


@pytest.mark.parametrize(("bits", "groups", "size"), [(3, 1, 3), (7, 2, 4), (16, 4, 4), (65, 17, 4)])
def test_codes_of_any_length_are_cut_into_groups(bits: int, groups: int, size: int) -> None:
    layer = ecoformer.create_attention("lsh_eco", 8, 1, bits=bits)
    expected = hashed_attention(9, 9, 8, groups, size, weighted=False)
    assert own(layer, (1, 9, 8)).add == expected.add


def test_causal_order_mixes_for_every_query() -> None:
    plain, causal = (hashed_attention(9, 9, 8, 4, 4, weighted=False, is_causal=x) for x in (False, True))
    assert causal.add - plain.add == (9 - 4) * 4 * 16 * 9
    layer = ecoformer.EcoAttention(8, 1)
    assert own(layer, {"x": torch.zeros(1, 9, 8), "is_causal": True}).add == causal.add


class Overridden(ecoformer.EcoAttention):
    name = "overridden"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        return super().attend(q, k, v, mask, is_causal) * 2


def test_what_a_subclass_computes_is_counted_step_by_step() -> None:
    found = own(Overridden(24, 3), (2, 50, 24))
    assert found.mul > own(ecoformer.EcoAttention(24, 3), (2, 50, 24)).mul + 2 * 50 * 24
    assert found.lookup < own(ecoformer.EcoAttention(24, 3), (2, 50, 24)).lookup


@pytest.mark.parametrize("name", ["eco", "klsh_eco", "lsh_eco", "sharp_eco", "bi_eco", "performer", "fp_eco"])
def test_linear_mechanisms_are_linear_in_tokens(name: str) -> None:
    layer = ecoformer.create_attention(name, 24, 3)
    one, two, three = (
        ecoformer.cost(layer, (2, n, 24), accounting="exact").total.to_dict() for n in (100, 200, 300)
    )
    assert all(three[kind] - two[kind] == two[kind] - one[kind] for kind in one)


CONFIGS: dict[str, dict[str, Any]] = {"linformer": {"k": 8}, "reformer": {"bucket_size": 8}}


@pytest.mark.parametrize("attention", ["softmax", "performer", "linformer", "reformer", "combiner"])
def test_shapes_alone_count_like_a_real_run(attention: str) -> None:
    model = pvt(attention, **CONFIGS.get(attention, {})).eval()
    rows, uncounted = exact_rows(model, IMAGE)
    assert uncounted == []
    assert (sum((counts for *_, counts in rows), Counts()), ()) == executed(model, torch.randn(IMAGE))


def test_rows_belong_to_the_modules_that_compute() -> None:
    rows = {name: (kind, part, counts) for name, kind, part, counts in exact_rows(pvt("eco"), IMAGE)[0]}
    products, tokens = 2 * 256 * 8 * 16, 2 * 256
    moved = 4 * (tokens * 8 + 8 * 16 + 16 + tokens * 16)
    linear = ("Linear", "ffn", Counts(mul=products, add=products, bytes=moved))
    assert rows["stages.0.blocks.0.mlp.fc1"] == linear
    residual = Counts(add=2 * tokens * 8, bytes=24 * tokens * 8)
    assert rows["stages.0.blocks.0"] == ("Block", "other", residual)
    layer = "stages.1.blocks.1.attn.attention"
    assert rows[layer][:2] == ("eco", "attention")
    assert rows[f"{layer}.hasher"][2].exp > 0


def test_the_model_is_left_as_it_was() -> None:
    model = pvt("eco").train()
    model.get_submodule("head").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    exact_rows(model, IMAGE)
    with pytest.raises(RuntimeError):
        exact_rows(model, (1, 5, 64, 64))
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks or "attend" in vars(m) for m in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module.is_fitted for module in model.modules() if isinstance(module, Hasher))


def test_text_encoder() -> None:
    model = TextEncoder(attention="softmax", dim=16, num_heads=2, depth=1, hidden=32, length=20)
    rows, uncounted = exact_rows(model, torch.zeros(2, 20, dtype=torch.int64))
    assert uncounted == []
    assert sum(counts.lookup for *_, counts in rows) == 2 * 20 * 16


@pytest.mark.parametrize("name", ["pvt_v2_b0", "resnet18", "ecoformer_twins_svt_small"])
def test_known_models_have_nothing_uncounted(name: str) -> None:
    rows, uncounted = exact_rows(timm.create_model(name), (1, 3, 224, 224))
    assert uncounted == []
    assert sum(counts.mul for *_, counts in rows) > 10**8


def test_the_result_file_is_what_is_computed() -> None:
    path = Path(__file__).resolve().parents[2] / "results" / "accounting.json"
    row = json.loads(path.read_text())["figures"]["native"][0]
    assert (row["resolution"], row["mechanism"]) == (224, "native")
    with torch.device("meta"):
        model = timm.create_model("pvt_v2_b0")
    assert ecoformer.cost(model, (1, 3, 224, 224)).energy_pj == row["paper"]
    assert ecoformer.cost(model, (1, 3, 224, 224), accounting="exact").total.to_dict() == row["total"]
