"""Hashers: codes against the paper's equations, state that survives, gradients, errors."""

import copy
import io
import re

import pytest
import torch
from torch import nn

from ecoformer import FitOptions, KernelHasher, KlshHasher, LshHasher, SignHasher, reference, unpack_codes

HEADS, DIM, BITS, SUPPORT = 2, 6, 8, 5
QUICK = FitOptions(steps=10, pairs=3)
MAKERS = {
    "kernel": lambda **kw: KernelHasher(HEADS, DIM, BITS, SUPPORT, **kw),
    "trainable": lambda **kw: KernelHasher(HEADS, DIM, BITS, SUPPORT, trainable=True, **kw),
    "klsh": lambda **kw: KlshHasher(HEADS, DIM, BITS, SUPPORT, **kw),
    "lsh": lambda **kw: LshHasher(HEADS, DIM, BITS, **kw),
    "channels": lambda **kw: SignHasher(HEADS, DIM, **kw),
    "fourier": lambda **kw: SignHasher(HEADS, DIM, BITS, features="fourier", **kw),
}
LEARNERS = ("kernel", "trainable", "klsh")
every_hasher = pytest.mark.parametrize("kind", MAKERS)
learners = pytest.mark.parametrize("kind", LEARNERS)


def tokens(batch=3, n=20, seed=0, dtype=torch.float32):
    draws = torch.randn(batch, HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))
    return (draws + 0.5).to(dtype)


def fitted(kind="kernel", seed=0, **kwargs):
    return MAKERS[kind](**kwargs).fit(tokens(), seed=seed, options=QUICK)


@every_hasher
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_codes_are_signs(kind, dtype):
    hasher, x = fitted(kind), tokens(seed=1, dtype=dtype)
    codes = hasher.codes(x)
    assert codes.dtype == torch.promote_types(dtype, torch.float32)
    assert codes.shape == (3, HEADS, 20, hasher.bits)
    assert codes.abs().eq(1).all()
    assert {-1.0, 1.0} == set(codes.float().unique().tolist())
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(hasher.codes(strided), codes)
    read = hasher(x)  # packed where nothing has a gradient, if it is worth it
    if read.dtype == torch.int64:
        read = unpack_codes(read, hasher.bits)
    assert torch.equal(reference.sign(read), codes)


@every_hasher
def test_zero_vector(kind):
    hasher, x = fitted(kind), tokens(seed=1)
    x[0, :, 3] = 0
    y = hasher(x.requires_grad_())
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@every_hasher
def test_nan_stays_where_it_is(kind):
    hasher, x = fitted(kind), tokens(seed=1)
    clean = hasher.project(x)
    x[1, 0, 4] = torch.nan
    codes = hasher.project(x)
    assert codes[1, 0, 4].isnan().all()
    reached = torch.zeros(3, HEADS, 20, dtype=torch.bool)
    reached[1, 0, 4] = True
    assert torch.equal(codes[~reached], clean[~reached])


@every_hasher
@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_length_does_not_matter(kind, scale):
    hasher, x = fitted(kind), tokens(seed=1)
    assert torch.equal(hasher.codes(x * scale), hasher.codes(x))


def through_file(source, target):
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    return target


COPIES = {
    "save and load": lambda hasher, new: through_file(hasher, new),
    "assign": lambda hasher, new: new.load_state_dict(hasher.state_dict(), assign=True) and new,
    "dtype": lambda hasher, new: copy.deepcopy(hasher).to(torch.float64).to(torch.float32),
}


@every_hasher
@pytest.mark.parametrize("how", COPIES)
def test_state_survives(kind, how):
    hasher, x = fitted(kind, seed=3), tokens(seed=1)
    twin = COPIES[how](hasher, MAKERS[kind]())
    assert bool(twin.fitted)
    assert torch.equal(twin(x), hasher(x))
    assert "fitted=True" in repr(twin)


@learners
def test_loading_random_hash_functions_warns_again(kind):
    hasher, new = fitted(kind), MAKERS[kind]()
    hasher(tokens())
    hasher.load_state_dict(new.state_dict())
    with pytest.warns(UserWarning, match="fit_hashers"):
        codes = hasher(tokens())
    assert torch.equal(codes, new(tokens()))
    assert "fitted=False" in repr(hasher)


def assert_computes_in_fp32(hasher, exact):
    """The functions are still those of `exact`, and so are codes of bf16 tokens."""
    x = tokens(seed=1, dtype=torch.bfloat16)
    for name, value in hasher.state_dict().items():
        assert torch.equal(value, exact.state_dict()[name])
        assert value.dtype == (torch.bool if name == "fitted" else torch.float32)
    assert torch.equal(hasher(x), exact(x.float()))


@every_hasher
def test_bfloat16_models_hash_in_fp32(kind):
    hasher = fitted(kind)
    for move in (nn.Module.bfloat16, lambda model: model.to(torch.bfloat16)):
        model = move(nn.Sequential(nn.Linear(2, 2), copy.deepcopy(hasher)))
        assert model[0].weight.dtype == torch.bfloat16
        assert_computes_in_fp32(model[1], hasher)


@every_hasher
def test_autocast_hashes_in_fp32(kind):
    hasher, x = fitted(kind), tokens(seed=1)
    expected = hasher(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hasher(x), expected)


def test_trainable_weights():
    hasher = MAKERS["trainable"]()
    weight = hasher.weight
    hasher.fit(tokens(), options=QUICK)
    assert hasher.weight is weight  # optimisers hold on to it
    assert weight.requires_grad
    assert weight.grad is None
    assert torch.equal(weight, fitted("kernel").weight)
    (hasher(tokens(seed=1)) * torch.arange(BITS)).sum().backward()
    assert weight.grad.isfinite().all()
    assert weight.grad.abs().sum() > 0


def kernel(**kwargs):
    return lambda: KernelHasher(HEADS, DIM, **{"bits": BITS, "support": SUPPORT, **kwargs})


def fit(x, mask=None):
    return lambda: MAKERS["kernel"]().fit(x, key_padding_mask=mask)


BROKEN = tokens()
BROKEN[1, 0, 3, 2] = torch.nan
BROKEN[2, 1] = torch.inf
MISTAKES = [
    (kernel(bits=0), "bits must be at least 1, got 0"),
    (kernel(bits=65), "bits must be from 1 to 64, got 65"),
    (kernel(support=0), "support must be at least 1, got 0"),
    (lambda: SignHasher(HEADS, DIM, reach=0), "reach must be positive or None, got 0"),
    (lambda: LshHasher(0, DIM), "num_heads must be at least 1, got 0"),
    (lambda: SignHasher(HEADS, 0), "head_dim must be at least 1, got 0"),
    (lambda: SignHasher(HEADS, DIM, features="pixels"), '"channels" or "fourier", got \'pixels\''),
    (lambda: SignHasher(HEADS, DIM, bits=DIM + 1), "bits must be at most head_dim=6"),
    (fit(tokens()[:, :1]), "tokens must be (B, 2, N, 6), got (3, 1, 20, 6)"),
    (fit(tokens(batch=1, n=4)), "(1, 2, 4, 6) hold 4 tokens a head (padding excluded), fewer than support=5"),
    (fit(BROKEN), "in 2 of 3 samples"),
    (
        fit(tokens(), torch.ones(20, 20).bool()),
        "key_padding_mask must be bool (B, N) = (3, 20), got torch.bool",
    ),
    (fit(tokens(), torch.ones(3, 20)), "key_padding_mask must be bool (B, N) = (3, 20), got torch.float32"),
    (lambda: fitted()(tokens()[:, :1]), "tokens must be (B, 2, N, 6), got (3, 1, 20, 6)"),
    (lambda: fitted()(tokens(), torch.ones(2, 20).bool()), "(B, N) = (3, 20), got torch.bool (2, 20)"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_tokens_are_floating_point(dtype):
    hasher = fitted()
    for call in (hasher, hasher.fit):
        with pytest.raises(TypeError, match=rf"^tokens must be floating point, got {dtype} \(3, 2, 20, 6\)$"):
            call(tokens().to(dtype))


@learners
def test_random_hash_functions_run_and_warn_once(kind):
    state = torch.get_rng_state()
    hasher, second = MAKERS[kind](), MAKERS[kind]()
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.warns(UserWarning, match="fit_hashers"):
        codes = hasher(tokens(n=200))
    assert torch.equal(hasher(tokens(n=200)), codes)  # a second warning would be an error
    second(tokens())
    assert hasher.codes(tokens(n=200)).mean(dim=(0, 2)).abs().max() < 1
    with pytest.raises(ValueError, match="NaN"):
        hasher.fit(BROKEN)
    assert not hasher.fitted
    assert hasher.fit(tokens(), options=QUICK).fitted


@every_hasher
def test_random_hash_functions_follow_the_seed(kind):
    def drawn(seed):
        torch.manual_seed(seed)
        hasher = MAKERS[kind]()
        again = copy.deepcopy(hasher)
        torch.manual_seed(seed)
        again.reset_parameters()
        return hasher.state_dict(), again.state_dict()

    first, again = drawn(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other, _ = drawn(2)
    assert kind == "channels" or any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dim", [1, 4, 64])
def test_random_projections_have_unit_scale(dim):
    y = KernelHasher(4, dim, 64).project(torch.randn(8, 4, 500, dim))
    assert y.square().mean().sqrt() == pytest.approx(1, abs=0.15)
    assert abs(y.mean()) < 0.1


def test_gradients_pass_within_the_reach():
    """Numbers keep their signs; beyond `reach` times a token's root mean square, `hash_attention` is flat."""
    hasher, x = SignHasher(HEADS, DIM, reach=0.7), tokens().requires_grad_()
    y = hasher(x)
    size = x.detach().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(y, x / (0.7 * size))
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, (1 / (0.7 * size)).expand_as(x))  # the scale counts as a constant
