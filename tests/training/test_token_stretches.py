"""Layers and encoders on stretches of the tokens: results and gradients of the whole, on three ranks."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from ecoformer.attention.splitting import check_split, split_tokens, token_slice
from torch import nn
from training_runs import on_ranks

from ecoformer import FitOptions, create_attention, fit_hashers
from ecoformer.models.text import PAD, TextEncoder, TwoTowerEncoder

RANKS, N, DIM = 3, 13, 8
LAYERS = {
    "eco": ("eco", {"support": 4}, False),
    "eco-causal": ("eco", {"support": 4}, True),
    "eco-local": ("eco", {"support": 4, "local": 5}, False),
    "eco-local-causal": ("eco", {"support": 4, "local": 5}, True),
    "eco-official": ("eco", {"support": 4, "bias": "official"}, False),
    "klsh_eco": ("klsh_eco", {"support": 4}, False),
    "lsh_eco": ("lsh_eco", {"local": 3}, False),
    "bi_eco": ("bi_eco", {"local": 1}, False),
    "sharp_eco": ("sharp_eco", {"local": 3}, False),
    "sharp_eco-causal": ("sharp_eco", {}, True),
}
SIZES = {"vocabulary": 9, "length": 16, "dim": DIM, "depth": 2, "num_heads": 2, "hidden": 8, "dropout": 0.0}
HASHED = {"attention": "eco", "attention_config": {"bits": 8, "support": 4, "local": 3}}
ENCODERS = ["mean", "none", "pairs"]


def tokens_and_mask():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, N, DIM, generator=generator, dtype=torch.float64)
    mask = torch.zeros(3, N, dtype=torch.bool)
    mask[1, 4:], mask[2, 7] = True, True
    return x, mask, torch.randn(3, N, DIM, generator=generator, dtype=torch.float64)


@cache
def layer(case):
    name, options, _ = LAYERS[case]
    torch.manual_seed(1)
    made = create_attention(name, DIM, 2, bits=8, **options).double()
    if made.local is not None:
        nn.init.normal_(made.local.weight)
    if getattr(made, "key_weights", None) is not None:
        nn.init.normal_(made.key_weights.exponent.weight)
    fit_hashers(made, [tokens_and_mask()[0]], options=FitOptions(steps=5), group="alone", progress=False)
    return made


def run_layer(case, mine, group=None):
    made, (x, mask, weight) = deepcopy(layer(case)), tokens_and_mask()
    x = x[:, mine].clone().requires_grad_()
    with split_tokens(made, group) if group else torch.enable_grad():
        out = made(x, key_padding_mask=mask[:, mine], is_causal=LAYERS[case][2])
        (out * weight[:, mine]).sum().backward()
    return {"out": out.detach(), "x": x.grad, "gradients": gradients(made)}


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def texts():
    ids = torch.randint(1, 9, (4, N), generator=torch.Generator().manual_seed(2))
    ids[0, 3:], ids[1, 10:], ids[2] = PAD, PAD, PAD  # the third text is nothing but padding
    return ids


@cache
def encoder(case):
    torch.manual_seed(3)
    cls = TwoTowerEncoder if case == "pairs" else TextEncoder
    model = cls(**SIZES, **HASHED, classes=3, **({"pool": "none"} if case == "none" else {})).double()
    for name, p in model.named_parameters():
        if name.endswith("local.weight"):
            nn.init.normal_(p)
    reads = model.encoder if case == "pairs" else model
    fit_hashers(reads, [texts()[3:].repeat(2, 1)], options=FitOptions(steps=5), group="alone")
    return model


def run_encoder(case, group=None):
    model, ids = deepcopy(encoder(case)), texts()
    weight = torch.randn(4, N, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with split_tokens(model, group) if group else torch.enable_grad():
        logits = model(ids, ids.flip(0)) if case == "pairs" else model(ids)
        mine = slice(0, N) if group is None else token_slice(N, group)
        (logits * (weight[:, mine] if case == "none" else weight[:, 0])).sum().backward()
    return {"out": logits.detach(), "gradients": gradients(model)}


def too_short(group):
    model = TextEncoder(**SIZES, **HASHED)
    with split_tokens(model, group):
        model(texts()[:, :2])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")

    def run(rank):
        dist.init_process_group("gloo")
        group = dist.group.WORLD
        found = {case: run_layer(case, token_slice(N, group), group) for case in LAYERS}
        found |= {case: run_encoder(case, group) for case in ENCODERS}
        with pytest.raises(ValueError, match="2 tokens over 3 ranks leave 0 to some"):
            too_short(group)
        torch.save(found, folder / f"{rank}.pt")

    for case in LAYERS:
        layer(case)
    for case in ENCODERS:
        encoder(case)
    assert on_ranks(run, ranks=RANKS) == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def summed(ranks, case):
    every = [rank[case]["gradients"] for rank in ranks]
    return {name: sum(each[name] for each in every) for name in every[0]}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_on_stretches(case, ranks):
    expected = run_layer(case, slice(0, N))
    for what in ("out", "x"):
        assert_equal(torch.cat([rank[case][what] for rank in ranks], dim=1), expected[what])
    assert_equal(summed(ranks, case), expected["gradients"])


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_on_stretches(case, ranks):
    expected = run_encoder(case)
    if case == "none":
        assert_equal(torch.cat([rank[case]["out"] for rank in ranks], dim=1), expected["out"])
        assert_equal(summed(ranks, case), expected["gradients"])
        return
    for rank in ranks:
        assert_equal(rank[case]["out"], expected["out"])
    # Every rank has the loss of the whole texts, so that the sum of all is three times as large.
    mean = {name: gradient / RANKS for name, gradient in summed(ranks, case).items()}
    assert_equal(mean, expected["gradients"])


def test_outside_the_context_a_model_is_as_it_was():
    model = TextEncoder(**SIZES, **HASHED)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with split_tokens(model, "a group"):
        assert model.token_group == model.blocks[1].attn.token_group == "a group"
        assert model.blocks[0].attn.local.token_group == "a group"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model.token_group is None


def test_a_layer_of_an_image_is_not_split():
    with pytest.raises(ValueError, match=r"local cannot split .*: local=\(3, 3\) spans an image"):
        check_split(create_attention("eco", DIM, 2, local=(3, 3)), N, 2)
