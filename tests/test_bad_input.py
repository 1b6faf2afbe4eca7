"""Wrong arguments are named in one line."""

from __future__ import annotations

import pytest
import torch

from ecoformer import affinity, hash_attention, pack_codes, use_kernels

C = torch.ones(2, 3, 5, 16)
V = torch.ones(2, 3, 5, 4)
PACKED = torch.zeros(2, 3, 5, dtype=torch.int64)
SHORT = torch.zeros(2, 3, 5, dtype=torch.int16)
NEGATIVE = torch.tensor([[[1.0, 0.5, 0.2, 0.1, 0.3]] * 3 + [[1.0, 1.0, 1.0, 1.0, -1.0]]])


def mask(*shape, dtype=torch.bool):
    return {"key_padding_mask": torch.zeros(shape, dtype=dtype)}


# what is wrong: arguments, options, and what the error's one line must say
CALLS = {
    "v is a vector": ((C, C, V[0, 0, 0]), {}, ["v ", "(B, H, N, D)", "(4,)"]),
    "v is whole numbers": ((C, C, V.long()), {}, ["v ", "floating point", "int64", "(2, 3, 5, 4)"]),
    "q lacks an axis": ((C[0], C, V), {}, ["q ", "(3, 5, 16)", "(2, 3, 5, 4)"]),
    "k lacks an axis": ((C, C[0], V), {}, ["k ", "(3, 5, 16)", "(2, 3, 5, 4)"]),
    "batches differ": ((C[:1], C, V), {}, ["q ", "(1, 3, 5, 16)", "(2, 3, 5, 4)"]),
    "keys differ from values": ((C, C[:, :, :4], V), {}, ["k ", "(2, 3, 4, 16)", "(2, 3, 5, 4)"]),
    "bits differ": ((C, C[..., :8], V), {}, ["k ", "16 bits", "(2, 3, 5, 8)"]),
    "no bits": ((C[..., :0], C[..., :0], V), {}, ["q ", "(2, 3, 5, 0)"]),
    "packed without bits": ((PACKED, PACKED, V), {}, ["q ", "int64", "pass bits=b", "1 to 64", "None"]),
    "packed bits 65": ((PACKED, PACKED, V), {"bits": 65}, ["q ", "1 to 64", "65"]),
    "packed bits 17 of 16": ((SHORT, SHORT, V), {"bits": 17}, ["q ", "1 to 16", "17"]),
    "bits contradict numbers": ((C, C, V), {"bits": 8}, ["q ", "8 bits", "(2, 3, 5, 16)"]),
    "packed keys of other bits": ((C, PACKED, V), {"bits": 8}, ["q ", "8 bits", "(2, 3, 5, 16)"]),
    "codes elsewhere": ((C, C.to("meta"), V), {}, ["k ", "meta", "cpu"]),
    "weight elsewhere": ((C, C, V), {"key_weight": V[..., 0].to("meta")}, ["key_weight", "meta", "cpu"]),
    "weight of other shape": ((C, C, V), {"key_weight": V}, ["key_weight", "(2, 3, 5)", "(2, 3, 5, 4)"]),
    "weight of whole numbers": ((C, C, V), {"key_weight": PACKED}, ["key_weight", "floating", "int64"]),
    "mask elsewhere": (
        (C, C, V),
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool, device="meta")},
        ["key_padding_mask", "meta", "cpu"],
    ),
    "mask N x N": ((C, C, V), mask(5, 5), ["key_padding_mask", "(5, 5)", "(2, 5)", "is_causal=True"]),
    "mask B x H x N x N": ((C, C, V), mask(2, 3, 5, 5), ["key_padding_mask", "(2, 5)", "is_causal=True"]),
    "mask of floats": ((C, C, V), mask(2, 5, dtype=torch.float32), ["key_padding_mask", "bool", "float32"]),
    "mask of other batch": ((C, C, V), mask(3, 5), ["key_padding_mask", "(3, 5)", "(2, 5)"]),
    "causal cross attention": (
        (C[:, :, :4], C, V),
        {"is_causal": True},
        ["is_causal=True", "(2, 3, 4, 16)", "(2, 3, 5, 16)"],
    ),
    "affinity of other groups": ((C, C, V, affinity.paper(16, 8)[:, :1]), {}, ["affinity", "(1, 1, 9)"]),
    "affinity of other heads": (
        (C, C, V, affinity.paper(16).expand(2, -1, -1)),
        {},
        ["affinity", "H = 3", "(2, 4, 5)"],
    ),
    "affinity of 9 bits": ((C, C, V, torch.ones(1, 2, 10)), {}, ["affinity", "s <= 8", "(1, 2, 10)"]),
    "affinity not square": ((C, C, V, torch.ones(1, 4, 16, 8)), {}, ["affinity", "2^s", "(1, 4, 16, 8)"]),
    "affinity is a vector": ((C, C, V, torch.ones(5)), {}, ["affinity", "(1 or H, G, s + 1)", "(5,)"]),
    "affinity of whole numbers": ((C, C, V, affinity.paper(16).long()), {}, ["affinity", "int64"]),
    "affinity elsewhere": ((C, C, V, affinity.paper(16, device="meta")), {}, ["affinity", "cpu", "meta"]),
    "affinity negative": ((C, C, V, NEGATIVE), {}, ["affinity", "negative", "must be positive"]),
    "state of another shape": (
        (C, C, V),
        {"state": torch.zeros(2, 3, 64, 4)},
        ["state", "(2, 3, 64, 5)", "(2, 3, 64, 4)"],
    ),
    "state of whole numbers": ((C, C, V), {"state": torch.zeros(2, 3, 64, 5).long()}, ["state", "int64"]),
    "state elsewhere": ((C, C, V), {"state": torch.zeros(2, 3, 64, 5, device="meta")}, ["state", "meta"]),
}


def one_line_error(error, call, says):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in says), f"{message!r} must say {says}"


@pytest.mark.parametrize("kernels", ["eager", "cpu"])
@pytest.mark.parametrize(("arguments", "options", "says"), CALLS.values(), ids=CALLS)
def test_attention_names_the_wrong_argument(arguments, options, says, kernels):
    with use_kernels(kernels):
        one_line_error(ValueError, lambda: hash_attention(*arguments, **options), says)


def test_other_calls_name_the_wrong_argument():
    one_line_error(ValueError, lambda: pack_codes(torch.ones(2, 65)), ["(2, 65)", "1 to 64"])
    one_line_error(ValueError, lambda: pack_codes(torch.ones(2, 0)), ["(2, 0)", "1 to 64"])
    one_line_error(ValueError, lambda: use_kernels("numba").__enter__(), ['"eager"', '"cpu"', '"triton"'])
    one_line_error(ValueError, lambda: affinity.paper(16, 9), ["1 to 8 bits", "size=9"])
    one_line_error(ValueError, lambda: affinity.tight(0), ["bits=0"])
    one_line_error(ValueError, lambda: affinity.grouped(torch.ones(3), 1.0, 16), ["beta", "G = 4", "(3,)"])
    one_line_error(ValueError, lambda: affinity.grouped(0.5, torch.ones(2, 3), 16), ["weight", "(2, 3)"])
