"""Text encoders: padding never counts, whatever the mechanism; wrong input is named in one line."""

import pytest
import torch
from torch.nn import functional as F

from ecoformer import FitOptions, fit_hashers, hashers_of, list_attentions, load, save
from ecoformer.models.text import PAD, TextEncoder, TwoTowerEncoder, byte_tokens

B, N, LENGTH, VOCABULARY, DIM, CLASSES = 4, 23, 40, 64, 16, 3
SIZES = {
    "vocabulary": VOCABULARY,
    "length": LENGTH,
    "dim": DIM,
    "num_heads": 2,
    "hidden": 24,
    "classes": CLASSES,
}
every_mechanism = pytest.mark.parametrize("name", list_attentions())
softmax_and_eco = pytest.mark.parametrize("name", ["softmax", "eco"])
both_models = pytest.mark.parametrize("cls", [TextEncoder, TwoTowerEncoder])


def tokens(*lengths, n=N, seed=0):
    """A row of random ids for each length, padded to n."""
    lengths = lengths or (N,) * B
    ids = torch.randint(1, VOCABULARY, (len(lengths), n), generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(torch.arange(n) >= torch.tensor(lengths)[:, None], PAD)


def make(name="eco", seed=0, cls=TextEncoder, **kwargs):
    """A model in eval mode with fitted hashers, its weights large enough for logits to tell things apart."""
    torch.manual_seed(seed)
    model = cls(**{"attention": name, **SIZES, **kwargs})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.ndim == 2 else 1)
    encoder = model.encoder if cls is TwoTowerEncoder else model
    if hashers_of(encoder):
        fit(encoder, tokens(23, 20, 17, 11, seed=9))
    return model.eval()


def fit(model, *batches):
    return fit_hashers(model, list(batches), options=FitOptions(steps=2), progress=False)


def gradients(model, *inputs, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    model.train()(*inputs).square().sum().backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


@every_mechanism
def test_forward(name):
    model, x = make(name), tokens(23, 20, 23, 7)
    logits = model(x)
    assert logits.shape == (B, CLASSES)
    assert logits.isfinite().all()
    assert torch.equal(model(x), logits)
    assert torch.equal(model(x, x == PAD), logits)
    assert torch.equal(model(x.int()), logits)
    torch.testing.assert_close(model(x[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)
    assert (logits[0] - logits[2]).abs().max() > 0.01
    assert (model(x.flip(1), x.flip(1) == PAD) - logits).abs().amax(dim=1).min() > 0.1, "order counts"
    assert model(x[:0]).shape == (0, CLASSES)


@every_mechanism
def test_backward(name):
    model = make(name)
    found = gradients(model, tokens(23, 20, 15, 0))
    for key, grad in found.items():
        assert grad is not None, key
        assert grad.isfinite().all(), key
        assert grad.abs().sum() > 0, key
    assert (found["embedding.weight"][PAD] == 0).all()
    found = gradients(model, tokens(20, 3, n=LENGTH))
    assert (found["positions"][20:] == 0).all()
    assert (found["positions"][:20] != 0).any(dim=1).all()


# Not so by itself: combiner's blocks depend on N. Reformer's buckets do too, but not up to 128 tokens.
@every_mechanism
def test_logits_do_not_depend_on_how_far_a_text_is_padded(name):
    model = make(name, attention_config={"block": 4} if name == "combiner" else None)
    x = tokens(23, 20, 7, 1)
    alone = torch.cat([model(row[row != PAD][None]) for row in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-4, atol=1e-5)
    for n in (N + 1, LENGTH):
        torch.testing.assert_close(model(F.pad(x, (0, n - N), value=PAD)), alone, rtol=1e-4, atol=1e-5)


@every_mechanism
def test_what_padding_holds_does_not_matter(name):
    model, x = make(name), tokens()
    mask = torch.arange(N) >= torch.tensor([23, 20, 7, 1])[:, None]
    logits = model(x, mask)
    changed = torch.where(mask, tokens(seed=1), x)
    assert (changed != x).any()
    torch.testing.assert_close(model(changed, mask), logits)
    torch.testing.assert_close(model(x.masked_fill(mask, PAD)), logits)
    assert not torch.allclose(model(x)[1:], logits[1:])


@softmax_and_eco
def test_text_of_nothing_but_padding(name):
    model, x = make(name), tokens(23, 0, 5, 0)
    logits = model(x)
    torch.testing.assert_close(logits[1], model.head(torch.zeros(DIM)))
    torch.testing.assert_close(logits[3], logits[1])
    assert all(grad.isfinite().all() for grad in gradients(model, x[1:2]).values())


def test_mean_over_the_tokens_of_the_text():
    model, x = make(), tokens(23, 20, 7, 1)
    features = model.forward_features(x)
    by_hand = torch.stack([row[ids != PAD].mean(dim=0) for row, ids in zip(features, x, strict=True)])
    torch.testing.assert_close(model.pool(features, x == PAD), by_hand)
    torch.testing.assert_close(model.head(by_hand), model(x))
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), by_hand)


def test_sums_of_half_precision_are_wide():
    model, nothing = make(), torch.zeros(1, 4096, dtype=torch.bool)
    ones = torch.full((1, 4096, DIM), 60.0, dtype=torch.float16)
    assert torch.equal(model.pool(ones, nothing), ones[:, 0])
    half, x = make().bfloat16(), tokens(23, 20, 7, 0)
    assert half(x).dtype == torch.bfloat16
    torch.testing.assert_close(half(x).float(), make()(x), rtol=0.1, atol=0.3)


def test_hashers_are_found_and_fitted():
    x = tokens(23, 20, 17, 11)
    mapping = {"tokens": x, "key_padding_mask": x == PAD}
    batches = [x[:2], x[2:]], [mapping], [F.pad(x, (0, 9), value=PAD)]
    states = []
    for those in batches:
        torch.manual_seed(0)
        model = TextEncoder(attention="eco", **SIZES)
        assert fit(model, *those) == ["blocks.0.attn.hasher", "blocks.1.attn.hasher"]
        states.append({key: value for key, value in model.state_dict().items() if "hasher" in key})
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key
        # Learned weights are large and ill-conditioned: rounding shows in them, and in all that follows.
        if key.startswith("blocks.0") and not key.endswith("weight"):
            torch.testing.assert_close(states[2][key], value, msg=key)


@softmax_and_eco
def test_compile(name):
    model, x = make(name), tokens(23, 20, 7, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)


def test_two_towers_compare_two_means():
    model, first, second = make(cls=TwoTowerEncoder), tokens(23, 20, 7, 0), tokens(9, 2, 7, 11, n=11, seed=1)
    a, b = model.encoder(first), model.encoder(second)
    assert a.shape == b.shape == (B, DIM)
    torch.testing.assert_close(
        model(first, second), model.head(torch.cat([a, b, a * b, a - b], dim=1)), rtol=1e-4, atol=1e-5
    )
    assert [(x.in_features, x.out_features) for x in model.head[::2]] == [(4 * DIM, 24), (24, CLASSES)]
    assert (model(first, second) - model(second, first)).abs().max() > 0.01
    shown = first.masked_fill(first == PAD, 5)
    torch.testing.assert_close(model(shown, second, first == PAD), model(first, second))
    for key, grad in gradients(model, first, second).items():
        assert grad.abs().sum() > 0, key


def test_the_given_configuration_wins():
    given = {"seq_len": 77, "k": 5, "attn_drop": 0.0, "proj_drop": 0.5}
    attn = TextEncoder(attention="linformer", attention_config=given, **SIZES).blocks[0].attn
    assert (attn.seq_len, attn.k, attn.attn_drop, attn.proj_drop.p) == (77, 5, 0, 0.5)
    assert given == {"seq_len": 77, "k": 5, "attn_drop": 0.0, "proj_drop": 0.5}


@both_models
def test_defaults_are_those_of_the_long_range_arena(cls):
    model = cls(attention="softmax")
    encoder = model if cls is TextEncoder else model.encoder
    attn = encoder.blocks[0].attn
    assert encoder.embedding.weight.shape == (512, 64)
    assert encoder.positions.shape == (4096, 64)
    assert (len(encoder.blocks), attn.num_heads, attn.head_dim, attn.attn_drop) == (2, 2, 32, 0.1)
    assert encoder.blocks[0].mlp[0].weight.shape == (128, 64)
    assert {m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    assert model.head[0].weight.shape == (128, 64 if cls is TextEncoder else 256)
    assert isinstance(model.head[1], torch.nn.ReLU)
    assert model.head[2].weight.shape == (2, 128)
    assert cls(classes=5, depth=1, length=8).classes == 5


@pytest.mark.parametrize("name", ["softmax", "performer"])
def test_without_pooling_the_head_reads_each_token(name):
    model, pooled, x = make(name, pool="none"), make(name), tokens(23, 13, 20)
    logits, features = model(x), model.forward_features(x)
    assert logits.shape == (3, N, CLASSES)
    assert torch.equal(logits, model.head(features))
    assert torch.equal(pooled(x), pooled.head(pooled.pool(features, x == PAD)))
    torch.testing.assert_close(logits[1, :13], model(x[1:2, :13])[0], rtol=1e-4, atol=1e-5)
    bare = make(name, pool="none", classes=0)
    assert torch.equal(bare(x), bare.forward_features(x))


def test_pooling_is_saved(tmp_path):
    model, x = make("softmax", pool="none"), tokens()
    assert torch.equal(load(save(model, tmp_path / "x.safetensors"))(x), model(x))
    model.save_pretrained(tmp_path / "hub")
    assert torch.equal(TextEncoder.from_pretrained(tmp_path / "hub")(x), model(x))


def test_bytes_become_tokens():
    found = byte_tokens(["abc", b"\x00\xff", "", "é€"], 6)
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [98, 99, 100, 0, 0, 0],
        [1, 256, 0, 0, 0, 0],
        [0] * 6,
        [0xC3 + 1, 0xA9 + 1, 0xE2 + 1, 0x82 + 1, 0xAC + 1, 0],
    ]
    everything = byte_tokens([bytes(range(256))], 256)
    assert everything.tolist() == [list(range(1, 257))]


def test_texts_are_cut_and_padded():
    text = "€" * 5000
    found = byte_tokens([text, "ab"], 4096, cut=4000)
    assert found.shape == (2, 4096)
    assert (found != PAD).sum(dim=1).tolist() == [4000, 2]
    assert bytes((found[0, :4000] - 1).tolist()) == text.encode()[:4000]
    assert byte_tokens([], 7).shape == (0, 7)
    with pytest.raises(TypeError, match="texts must be a list of texts, got one str"):
        byte_tokens("text", 4)
    with pytest.raises(ValueError, match="cut must be from 1 to length=4, got 5"):
        byte_tokens(["a"], 4, cut=5)


IDS = torch.ones(B, N, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "message"),
    [
        (["text"], None, TypeError, "first must be token ids .* got list"),
        (IDS.float(), None, TypeError, "first must be token ids .* got torch.float32"),
        (IDS[0], None, ValueError, r"first must be \(B, N\) .* got \(23,\)"),
        (IDS.repeat(1, 2), None, ValueError, rf"N from 1 to length={LENGTH}, got \(4, 46\)"),
        (VOCABULARY * IDS, None, ValueError, rf"ids from 64 to 64: .* 0 to {VOCABULARY - 1}"),
        (IDS, IDS, ValueError, r"first_padding_mask must be bool \(4, 23\) .* got torch.int64"),
        (IDS, IDS[0].bool(), ValueError, r"first_padding_mask must be bool .* got torch.bool \(23,\)"),
        (IDS[:1], None, ValueError, r"first \(1, 23\) and second \(4, 23\) must hold as many texts"),
    ],
)
def test_wrong_tokens_and_masks(tokens, mask, error, message):
    with pytest.raises(error, match=message) as caught:
        make("softmax", cls=TwoTowerEncoder)(tokens, IDS, mask)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "ecco"}, "unknown attention 'ecco'"),
        ({"attention_config": {"attn_drop": 0.1}}, "^attn_drop must be 0"),
        ({"pool": "max"}, "pool"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextEncoder(**{**SIZES, **arguments})
