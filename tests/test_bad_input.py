"""Wrong arguments are named in one line; NaN and padding stay where they are."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from ecoformer import HashAttentionState, hash_attention, pack_codes, unpack_codes

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
BIAS = pytest.mark.parametrize("bias", ["paper", "tight"])

C = torch.ones(2, 3, 5, 16)
V = torch.ones(2, 3, 5, 4)
PACKED = torch.zeros(2, 3, 5, dtype=torch.int64)
SHORT = torch.zeros(2, 3, 5, dtype=torch.int16)


def mask(*shape, dtype=torch.bool):
    return {"key_padding_mask": torch.zeros(shape, dtype=dtype)}


# what is wrong: arguments, options, error, and what its one line must say
CALLS = {
    "codes_q is a list": (([1], C, V), {}, TypeError, ["codes_q must be a tensor, got list"]),
    "v is missing": ((C, C, None), {}, TypeError, ["v must be a tensor, got NoneType"]),
    "mask is a list": (
        (C, C, V),
        {"key_padding_mask": [True]},
        TypeError,
        ["key_padding_mask must be a tensor, got list"],
    ),
    "v is a vector": ((C, C, V[0, 0, 0]), {}, ValueError, ["v ", "(4,)"]),
    "v is whole numbers": ((C, C, V.long()), {}, TypeError, ["v ", "int64", "(2, 3, 5, 4)"]),
    "codes_q lacks an axis": ((C[0], C, V), {}, ValueError, ["codes_q", "(3, 5, 16)", "(2, 3, 5, 4)"]),
    "codes_k lacks an axis": ((C, C[0], V), {}, ValueError, ["codes_k", "(3, 5, 16)", "(2, 3, 5, 4)"]),
    "batches differ": ((C[:1], C, V), {}, ValueError, ["codes_q", "(1, 3, 5, 16)", "(2, 3, 5, 4)"]),
    "keys differ from values": (
        (C, C[:, :, :4], V),
        {},
        ValueError,
        ["codes_k", "(2, 3, 4, 16)", "(2, 3, 5, 4)"],
    ),
    "bits differ": ((C, C[..., :8], V), {}, ValueError, ["codes_q", "codes_k", "16", "8", "(2, 3, 5, 8)"]),
    "no bits": ((C[..., :0], C[..., :0], V), {}, ValueError, ["codes_q", "(2, 3, 5, 0)"]),
    "codes are bool": ((C > 0, C > 0, V), {}, TypeError, ["codes_q", "bool", "(2, 3, 5, 16)"]),
    "packed without bits": ((PACKED, PACKED, V), {}, ValueError, ["codes_q", "int64", "bits", "(2, 3, 5)"]),
    "packed bits 65": ((PACKED, PACKED, V), {"bits": 65}, ValueError, ["bits=65", "codes_q", "64"]),
    "packed bits 17 of 16": ((SHORT, SHORT, V), {"bits": 17}, ValueError, ["bits=17", "codes_q", "16"]),
    "bits contradict codes": ((C, C, V), {"bits": 8}, ValueError, ["codes_q", "bits=8", "(2, 3, 5, 16)"]),
    "codes elsewhere": ((C, C.to("meta"), V), {}, ValueError, ["codes_k", "meta", "cpu"]),
    "mask elsewhere": (
        (C, C, V),
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool, device="meta")},
        ValueError,
        ["key_padding_mask", "meta", "cpu"],
    ),
    "mask N x N": ((C, C, V), mask(5, 5), ValueError, ["key_padding_mask", "(5, 5)", "N x N", "is_causal"]),
    "mask B x H x N x N": (
        (C, C, V),
        mask(2, 3, 5, 5),
        ValueError,
        ["key_padding_mask", "(2, 3, 5, 5)", "N x N"],
    ),
    "mask of floats": (
        (C, C, V),
        mask(2, 5, dtype=torch.float32),
        TypeError,
        ["key_padding_mask", "float32", "(2, 5)"],
    ),
    "mask of other batch": ((C, C, V), mask(3, 5), ValueError, ["key_padding_mask", "(3, 5)", "(2, 5)"]),
    "causal cross attention": (
        (C[:, :, :4], C, V),
        {"is_causal": True},
        ValueError,
        ["is_causal", "(2, 3, 4, 16)", "(2, 3, 5, 4)"],
    ),
    "unknown bias": ((C, C, V), {"bias": "none"}, ValueError, ["bias", "paper", "tight", "'none'"]),
}
OTHERS = {
    "pack a zero": (lambda: pack_codes(C * 0), ValueError, ["codes", "(2, 3, 5, 16)"]),
    "pack NaN": (lambda: pack_codes(C * torch.nan), ValueError, ["codes", "(2, 3, 5, 16)", "NaN"]),
    "pack 65 bits": (lambda: pack_codes(torch.ones(2, 65)), ValueError, ["codes", "(2, 65)", "64"]),
    "pack 0 bits": (lambda: pack_codes(torch.ones(2, 0)), ValueError, ["codes", "(2, 0)"]),
    "unpack floats": (lambda: unpack_codes(V, 4), TypeError, ["packed", "float32", "(2, 3, 5, 4)"]),
    "unpack int64 unsaid": (
        lambda: unpack_codes(PACKED),
        ValueError,
        ["packed", "int64", "bits", "(2, 3, 5)"],
    ),
    "unpack 9 of 8 bits": (
        lambda: unpack_codes(PACKED.byte(), 9),
        ValueError,
        ["bits=9", "packed", "uint8", "8"],
    ),
    "state with unknown bias": (lambda: HashAttentionState("none"), ValueError, ["bias", "'none'"]),
}


def one_line_error(error, call, says):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in says), f"{message!r} must say {says}"


@pytest.mark.parametrize(("arguments", "options", "error", "says"), CALLS.values(), ids=CALLS.keys())
def test_attention_names_the_wrong_argument(arguments, options, error, says):
    one_line_error(error, lambda: hash_attention(*arguments, **options), says)


@pytest.mark.parametrize(("call", "error", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_other_calls_name_the_wrong_argument(call, error, says):
    one_line_error(error, call, says)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_mask_error_offers_only_shapes_that_are_taken(lead, make_inputs):
    x = make_inputs(*lead, n=5)
    with pytest.raises(ValueError, match="key_padding_mask") as caught:
        hash_attention(*x, **mask(7, 7, 7))
    offered = re.findall(r"\([\d, ]*\)", str(caught.value).split("got")[0])
    assert offered
    for shape in offered:
        hash_attention(*x, **mask(*ast.literal_eval(shape)))


@CAUSAL
@BIAS
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_padded_keys_may_hold_anything(junk, is_causal, bias, make_inputs, make_mask):
    x = make_inputs(2, 3, n=70, dtype=torch.float32, whole=True)
    padding = make_mask(2, 3, 70)
    holes = padding.unsqueeze(-1)
    options = {"key_padding_mask": padding, "is_causal": is_causal, "bias": bias}
    dirty = x._replace(
        codes_k=x.codes_k.masked_fill(holes, junk), v=x.v.masked_fill(holes, junk)
    ).requires_grad()
    out = hash_attention(*dirty, **options)
    assert torch.equal(out, hash_attention(*x, **options))
    to_q, to_k, to_v = dirty.gradients(out, out.detach())
    assert to_q.isfinite().all()
    assert to_k.masked_select(holes).eq(0).all()
    assert to_v.masked_select(holes).eq(0).all()
    assert to_k.isfinite().all()
    assert to_v.isfinite().all()


@CAUSAL
@BIAS
@pytest.mark.parametrize("where", [0, 1, 2], ids=["codes_q", "codes_k", "v"])
def test_nan_stays_in_its_sample_and_is_not_hidden(where, is_causal, bias, make_inputs):
    x = make_inputs(3, 2, n=70, dtype=torch.float32, whole=True)
    dirty = x.requires_grad()
    with torch.no_grad():
        dirty[where][1, 0, 3] = torch.nan
    out = hash_attention(*dirty, is_causal=is_causal, bias=bias)
    others = torch.tensor([True, False, True])
    assert torch.equal(out[others], hash_attention(*x, is_causal=is_causal, bias=bias)[others])
    assert torch.equal(out[1, 1], hash_attention(*x, is_causal=is_causal, bias=bias)[1, 1])
    reached = out[1, 0, 3:4] if where == 0 else out[1, 0, 3:]
    assert reached.isnan().all()
    assert all(g[others].isfinite().all() for g in dirty.gradients(out, torch.ones_like(out)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_integers_that_are_no_signs_are_refused(dtype):
    bits = torch.tensor([[0, 1, 1, 0]] * 5).to(dtype)
    with pytest.raises(
        ValueError, match=r"codes_q \(5, 4\) of torch.\w+ must hold only \+1 and -1"
    ) as caught:
        hash_attention(bits, bits, torch.randn(5, 3))
    assert "\n" not in str(caught.value)
