"""What the package computed before it was rebuilt, frozen in `goldens.safetensors`.

    python tests/goldens/make.py      # writes the file; refuses to replace it without --force

Everything starts from numbers made by a rule (`numbers`), never from an initialisation, and every call into
the package goes through the few functions under "The package". When an API changes, change these, not the
file.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = Path(__file__).with_name("goldens.safetensors")
Numbers = dict[str, Tensor]


# ---- Numbers by rule -----------------------------------------------------------------------------


def numbers(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers around zero with variance 1, from a name and a shape (splitmix64, sums of four)."""
    count = 4 * math.prod(shape)
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    uniform = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    total = (uniform.reshape(-1, 4).sum(axis=1) - 2) * math.sqrt(3)
    return torch.from_numpy(total).reshape(shape).to(dtype)


def fill(model: nn.Module, name: str = "") -> None:
    """Give a model weights by rule: linear layers of gain 1, norms near 1, small biases."""
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        drawn = numbers(f"{name}.{key}", *tensor.shape)
        if tensor.ndim > 1:
            drawn = drawn / math.sqrt(math.prod(tensor.shape[1:]))
        elif "norm" in key.lower() and key.endswith("weight"):
            drawn = 1 + 0.1 * drawn
        else:
            drawn = 0.1 * drawn
        with torch.no_grad():
            tensor.copy_(drawn)


# ---- The package ---------------------------------------------------------------------------------


def operator(
    y_q: Tensor,
    y_k: Tensor,
    v: Tensor,
    affinity: str,
    size: int,
    beta: Tensor,
    weight: Tensor,
    *,
    key_weight: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Hashed attention from raw numbers: "paper", "tight", or "grouped" by beta and weight (H, G)."""
    from ecoformer import hash_attention

    options = {"key_weight": key_weight, "key_padding_mask": mask, "is_causal": is_causal}
    return hash_attention(y_q, y_k, v, _affinity(affinity, size, y_q.shape[-1], beta, weight), **options)


def stream(
    y_q: Tensor,
    y_k: Tensor,
    v: Tensor,
    affinity: str,
    size: int,
    beta: Tensor,
    weight: Tensor,
    *,
    key_weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The same in causal order, in three pieces."""
    from ecoformer import hash_attention

    f, state, pieces = _affinity(affinity, size, y_q.shape[-1], beta, weight), None, []
    for cut in (slice(0, 2), slice(2, 3), slice(3, None)):
        options = {
            "key_weight": None if key_weight is None else key_weight[..., cut],
            "key_padding_mask": None if mask is None else mask[..., cut],
        }
        y = (y_q[..., cut, :], y_k[..., cut, :], v[..., cut, :])
        out, state = hash_attention(*y, f, **options, is_causal=True, state=state, return_state=True)
        pieces.append(out)
    return torch.cat(pieces, dim=-2)


def _affinity(name: str, size: int, bits: int, beta: Tensor, weight: Tensor) -> Tensor:
    from ecoformer import affinity

    if name == "grouped":
        return affinity.grouped(beta, weight, bits, size)
    return {"paper": affinity.paper, "tight": affinity.tight}[name](bits)


def causal_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """out_t = sum of (a_t . b_s) c_s over s <= t."""
    from ecoformer.ops.eager import causal_product

    return causal_product(a, b, c)


def create(mechanism: str, **config: Any) -> nn.Module:
    """A layer."""
    from ecoformer import create_attention

    return create_attention(mechanism, DIM, HEADS, **config)


def parts(mechanism: str) -> dict[str, tuple[str, ...]]:
    """The roles that each of a layer's tensors holds, side by side in its first dimension."""
    sharp = mechanism == "sharp_eco"
    return {
        "qkv.weight": ("q", "k", "v"),
        "qkv.bias": ("q_bias", "k_bias", "v_bias"),
        "qk.weight": ("code_q", "code_k") if sharp else ("q",),
        "qk.bias": ("code_q_bias", "code_k_bias") if sharp else ("q_bias",),
        "v.weight": ("v",),
        "v.bias": ("v_bias",),
        "proj.weight": ("out",),
        "proj.bias": ("out_bias",),
        "local.weight": ("local",),
        "hasher.support_samples": ("support",),
        "hasher.mean": ("mean",),
        "hasher.sigma": ("sigma",),
        "hasher.weight": ("mixing",),
        "hasher.planes": ("planes",),
        "hasher.frequencies": ("frequencies",),
        "hasher.phases": ("phases",),
        "affinity.beta": ("beta",),
        "affinity.weight": ("weight",),
        "key_weights.exponent.weight": ("exponent",),
        "key_weights.exponent.bias": ("exponent_bias",),
        "projection": ("projection",),
        "rotations": ("rotations",),
        "proj_k": ("rows_k",),
        "proj_v": ("rows_v",),
    }


def codes_of(layer: nn.Module, x: Tensor) -> Tensor:
    """All codes that a layer computes, in one row."""
    found: list[Tensor] = []
    hook = layer.hasher.register_forward_pre_hook(lambda module, args: found.append(module.codes(args[0])))
    with torch.no_grad():
        layer(x)
    hook.remove()
    return torch.cat([codes.flatten() for codes in found])


def fitted(tokens: Tensor, mask: Tensor | None, **options: Any) -> Numbers:
    """Hash functions learned from tokens (B, H, N, D): 16 bits of 8 support samples, and their numbers y."""
    from ecoformer import FitOptions, KernelHasher

    hasher = KernelHasher(tokens.shape[1], tokens.shape[3], 16, 8)
    hasher.fit(tokens, key_padding_mask=mask, seed=0, options=FitOptions(**options))
    names = {"support_samples": "support", "mean": "mean", "sigma": "sigma", "weight": "mixing"}
    state = hasher.state_dict()
    learned = {role: state[name].clone() for name, role in names.items()}
    return learned | {"codes": hasher.codes(tokens)}


def released(state: dict[str, Tensor]) -> nn.Module:
    """The model of a checkpoint in the released layout."""
    from ecoformer import load_official

    return load_official(state)


def as_softmax(model: nn.Module, **options: Any) -> None:
    """Put softmax attention wherever it can go."""
    from ecoformer import convert

    convert(model, "softmax", **options)


def integer_attention(
    y_q: Tensor, y_k: Tensor, v: Tensor, f: Tensor, scale: Tensor, exponent: Tensor
) -> Tensor:
    """int8 outputs of signs and int8 values; f (H, G, s + 1) counts as `scale` says, keys as 2^exponent."""
    from ecoformer import pack_codes
    from ecoformer.ops import integer

    tables = (integer.integer_levels(f), integer.integer_multiplier(scale))
    return integer.integer_attention(pack_codes(y_q), pack_codes(y_k), v, *tables, exponent)


def quantised(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """The model in int8."""
    from ecoformer import quantize

    quantize(model, batches)
    return model


def paper_cost(model: str, mechanism: str) -> tuple[int, int]:
    """Multiplications and additions of a model by the paper's accounting."""
    from ecoformer import cost

    if model == "text":
        from ecoformer.models.text import TextEncoder

        with torch.device("meta"):
            built: nn.Module = TextEncoder(attention=mechanism, classes=0)
        example: Any = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    else:
        from ecoformer.third_party import import_timm

        with torch.device("meta"):
            built = import_timm().create_model(f"ecoformer_{model}", attention=mechanism)
        example = (1, 3, 224, 224)
    total = cost(built, example).total
    return total.mul, total.add


def paper_shares(model: str, mechanism: str) -> dict[str, float]:
    """Figure 2: shares of attention, FFN and the rest in a model's energy."""
    from ecoformer import cost
    from ecoformer.third_party import import_timm

    with torch.device("meta"):
        built = import_timm().create_model(f"ecoformer_{model}", attention=mechanism)
    return cost(built, (1, 3, 224, 224)).shares()


def paper_tables() -> dict[str, list[Any]]:
    """Our figure for every cell of the paper's tables: row, column, printed, ours."""
    from ecoformer.report.tables import list_tables, paper_table

    return {
        name: [[cell.row, cell.column, cell.printed, cell.ours] for cell in paper_table(name).cells]
        for name in list_tables()
    }


def bitfusion_table() -> list[Any]:
    """BitFusion: cycles and nJ of the paper's rows, and of single products."""
    from ecoformer.bitfusion import printed_table, simulate
    from ecoformer.operations import Product

    rows = [[row["method"], row["cycles"], row["energy_nj"]] for row in printed_table()]
    for inputs, outputs, bits in ((32, 3136, (8, 8)), (3136, 32, (8, 8)), (16, 32, (8, 2)), (16, 1, (8, 8))):
        found = simulate(Product(16, inputs, outputs), bits=bits)
        rows.append([f"{inputs} to {outputs} at {bits}", found.cycles, found.energy_nj])
    return rows


# ---- The operator --------------------------------------------------------------------------------

OPERATOR = ("plain", "mask", "weight", "causal", "causal mask", "stream", "cross")
WIDTHS = {7: 7, 12: 4, 16: 4, 17: 1, 25: 5, 64: 4}
"""Bits, and the size of groups."""


def operators() -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """Outputs and all gradients, in fp64."""
    for affinity in ("paper", "tight", "grouped"):
        for kind in OPERATOR:
            yield f"operator/{affinity}/16/{kind}", lambda a=affinity, k=kind: _operator(a, 16, 4, k, 2, 5)
        for bits, size in WIDTHS.items():
            for kind in ("plain", "causal"):
                yield (
                    f"operator/{affinity}/{bits}/{kind} short",
                    lambda a=affinity, b=bits, s=size, k=kind: _operator(a, b, s, k, 1, 3),
                )


def _operator(affinity: str, bits: int, size: int, kind: str, heads: int, n: int) -> Numbers:
    batch = 2 if "mask" in kind else 1
    keys = n + 3 if kind == "cross" else n
    # Half of the numbers lie inside of the gradient's window; some are zero, whose sign is +1.
    given = {
        "q": 1.5 * numbers("y_q", batch, heads, n, bits),
        "k": 1.5 * numbers("y_k", batch, heads, keys, bits),
        "v": numbers("v", batch, heads, keys, 2),
    }
    given["q"][..., 0, 0] = given["k"][..., 1, 1] = 0
    options: dict[str, Any] = {}
    if affinity == "grouped":
        given["beta"] = 0.5 + 0.2 * numbers("beta", heads, bits // size).clamp(-2, 2)
        given["weight"] = 1 + 0.4 * numbers("weight", heads, bits // size).clamp(-2, 2)
    if kind in ("weight", "stream", "cross"):
        given["key_weight"] = numbers("key_weight", batch, heads, keys).exp()
    if "mask" in kind:
        mask = torch.zeros(batch, keys, dtype=torch.bool)
        mask[0, ::2] = mask[1] = True  # the second sample sees no key at all
        options["mask"] = mask
        given["v"][0, :, 0] = given["k"][0, :, 2] = torch.nan
    for x in given.values():
        x.requires_grad_()
    if kind.startswith("causal"):
        options["is_causal"] = True
    if "key_weight" in given:
        options["key_weight"] = given["key_weight"]
    run = stream if kind == "stream" else operator
    levels = (given.get("beta"), given.get("weight"))
    out = run(given["q"], given["k"], given["v"], affinity, size, *levels, **options)
    return {"out": out.detach()} | _gradients(out, given)


def _gradients(out: Tensor, given: Numbers) -> Numbers:
    weight = numbers("gradient", *out.shape).to(out)
    found = torch.autograd.grad((out * weight).sum(), list(given.values()))
    return {f"grad {name}": x for name, x in zip(given, found, strict=True)}


def product() -> Numbers:
    """Performer's causal product, over more than one block of tokens."""
    given = {name: numbers(name, 1, 1, 131, 2).requires_grad_() for name in "abc"}
    out = causal_product(*given.values())
    return {"out": out.detach()} | _gradients(out, given)


# ---- Hash functions ------------------------------------------------------------------------------


def fits() -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """Seeded fits: as the recipes fit, as the paper does, and over padding."""
    tokens = numbers("fit", 3, HEADS, 30, DIM // HEADS, dtype=torch.float32)
    mask = torch.arange(30) >= torch.tensor([30, 20, 12])[:, None]
    yield "fit/default", lambda: fitted(tokens, None)
    yield "fit/random support", lambda: fitted(tokens, None, support="random")
    yield "fit/padding", lambda: fitted(tokens, mask)


# ---- Layers --------------------------------------------------------------------------------------

DIM, HEADS, BATCH, N = 8, 2, 2, 9
CONFIGS: dict[str, dict[str, Any]] = {
    "eco": {"support": 8},
    "klsh_eco": {"support": 8},
    "lsh_eco": {},
    "bi_eco": {},
    "fp_eco": {},
    "sharp_eco": {},
    "softmax": {},
    "performer": {},
    "linformer": {"seq_len": N, "k": 4},
    "reformer": {"bucket_size": 4},
    "combiner": {},
}
HASHED = ("eco", "klsh_eco", "lsh_eco", "bi_eco", "sharp_eco")


def layers(goldens: Numbers) -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """Outputs, gradients of the input and, once a mechanism, of all weights, in fp32.

    `eco` has the hash functions of `goldens`, so that it does not depend on fitting them again.
    """
    for mechanism in CONFIGS:
        for kind in ("plain", "padding", "causal", "padding causal", "local"):
            if "causal" not in kind or mechanism != "linformer":
                yield f"layer/{mechanism}/{kind}", lambda m=mechanism, k=kind: _layer(m, k, goldens)


def _layer(mechanism: str, kind: str, goldens: Numbers) -> Numbers:
    layer = weighted(mechanism, goldens, **({"local": 3} if kind == "local" else {}))
    x = numbers("x", BATCH, N, DIM, dtype=torch.float32).requires_grad_()
    mask = torch.arange(N) >= torch.tensor([N, 6])[:, None] if "padding" in kind else None
    out = layer(x, key_padding_mask=mask, is_causal="causal" in kind)
    (out * numbers("gradient", *out.shape).to(out)).sum().backward()
    found = {"out": out.detach(), "grad x": x.grad}
    if kind == "plain":
        for name, tensor in layer.named_parameters():
            if tensor.grad is not None:
                roles = parts(mechanism)[name]
                pieces = zip(roles, tensor.grad.chunk(len(roles)), strict=True)
                found |= {f"grad {role}": piece.clone() for role, piece in pieces}
    return found


def weighted(mechanism: str, goldens: Numbers, **config: Any) -> nn.Module:
    """A layer whose weights and hash functions follow the rule."""
    layer = create(mechanism, **CONFIGS[mechanism], **config)
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            roles = parts(mechanism)[name]
            for role, part in zip(roles, tensor.chunk(len(roles)), strict=True):
                key = f"fit/default/{role}"
                learned = mechanism == "eco" and key in goldens
                part.copy_(goldens[key] if learned else _role(role, *part.shape))
        else:
            tensor.fill_(True)
    layer.load_state_dict(layer.state_dict())
    return layer


def _role(role: str, *shape: int) -> Tensor:
    x = numbers(role, *shape)
    match role:
        case "q" | "k" | "v" | "out" | "code_q" | "code_k":
            return x / math.sqrt(shape[-1])
        case "mean":
            return 0.6 + 0.05 * x
        case "sigma":
            return 2 + 0.2 * x
        case "exponent":
            return 0.3 * x
        case "rows_k" | "rows_v" | "local":
            return 0.5 * x
        case _ if role.endswith("bias"):
            return 0.1 * x
    return x


def equal_codes(goldens: Numbers) -> dict[str, float]:
    """The share of codes that bf16 autocast leaves as they are in fp32."""
    x, shares = numbers("x", BATCH, N, DIM, dtype=torch.float32), {}
    for mechanism in HASHED:
        layer = weighted(mechanism, goldens)
        exact = codes_of(layer, x)
        with torch.autocast("cpu", torch.bfloat16):
            shares[mechanism] = (codes_of(layer, x) == exact).double().mean().item()
    return shares


# ---- Models --------------------------------------------------------------------------------------


def official() -> Numbers:
    """Logits of a checkpoint in the released layout, in fp64."""
    model = released(released_state()).double()
    return {"logits": model(numbers("images", 2, 3, 64, 64)).detach()}


def released_state() -> dict[str, Tensor]:
    """PVTv2-B0 with one block a stage, 16 bits from 25 support samples, as the released files name it."""
    state: dict[str, Tensor] = {}

    def weights(name: str, *shape: int) -> None:
        state[f"{name}.weight"] = numbers(name, *shape) / math.sqrt(math.prod(shape[1:]))
        state[f"{name}.bias"] = 0.1 * numbers(f"{name}.bias", shape[0])

    def norm(name: str, dim: int) -> None:
        state[f"{name}.weight"] = 1 + 0.1 * numbers(name, dim)
        state[f"{name}.bias"] = 0.1 * numbers(f"{name}.bias", dim)

    before = 3
    for i, (dim, ratio) in enumerate(zip((32, 64, 160, 256), (8, 8, 4, 4), strict=True), start=1):
        size, block, heads = 7 if i == 1 else 3, f"block{i}.0", dim // 32
        weights(f"patch_embed{i}.proj", dim, before, size, size)
        for name in (f"patch_embed{i}.norm", f"{block}.norm1", f"{block}.norm2", f"norm{i}"):
            norm(name, dim)
        if i == 4:
            weights(f"{block}.attn.qkv", 3 * dim, dim)
        else:
            weights(f"{block}.attn.to_qk", dim, dim)
            weights(f"{block}.attn.to_v", dim, dim)
            fast = f"{block}.attn.fast_attention"
            state[f"{fast}.projection_matrix"] = numbers(f"{fast}.unused", 64, 32)
            state[f"{fast}.ksh.A"] = numbers(f"{fast}.A", heads, 16, 25)
            state[f"{fast}.ksh.A"][0, 0] = 0  # a bit whose sign is zero everywhere
            state[f"{fast}.ksh.mvec"] = math.exp(-0.5) + 0.02 * numbers(f"{fast}.mvec", 1, heads, 1, 25)
            state[f"{fast}.ksh.anchor"] = numbers(f"{fast}.anchor", 1, heads, 25, 32) / math.sqrt(32)
        weights(f"{block}.attn.proj", dim, dim)
        weights(f"{block}.mlp.fc1", ratio * dim, dim)
        weights(f"{block}.mlp.dwconv.dwconv", ratio * dim, 1, 3, 3)
        weights(f"{block}.mlp.fc2", dim, ratio * dim)
        before = dim
    weights("head", 10, before)
    return {name: tensor.float() for name, tensor in state.items()}


def pyramids() -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """PVTv2 and Twins with softmax over all tokens in the first three stages: the MSA of these weights."""
    for name in ("pvt_v2", "twins"):
        yield f"msa/{name}", lambda n=name: {"logits": _pyramid(n)(numbers("images", 2, 3, 32, 32)).detach()}


def _pyramid(name: str) -> nn.Module:
    from timm.models.pvt_v2 import PyramidVisionTransformerV2
    from timm.models.twins import Twins

    shape: dict[str, Any] = {"depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "num_classes": 5}
    if name == "pvt_v2":
        model: nn.Module = PyramidVisionTransformerV2(embed_dims=(8, 8, 16, 16), **shape)
    else:
        model = Twins(
            img_size=32, embed_dims=(8, 8, 16, 16), mlp_ratios=(2, 2, 2, 2), wss=(7, 7, 7, 7), **shape
        )
    model.double().eval()
    fill(model, name)
    as_softmax(model)
    return model


TEXTS = ("bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
IMAGES = ("deit", "dinov2", "vit", "vit_msn")


def families() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]]:
    """Models that softmax attention leaves as they are, each with its input: fp64, weights by rule."""
    for name in TEXTS:
        yield name, lambda n=name: _transformers(n)
    for name in IMAGES:
        yield name, lambda n=name: _transformers(n)
    yield "timm vit", _timm_vit
    yield "encoder", _encoder


def _transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if name == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    if name in TEXTS:
        config = transformers.AutoConfig.for_model(name, vocab_size=40, max_position_embeddings=24, **sizes)
        tokens = (numbers("tokens", 2, 11).abs() * 10).long().clamp(3, 39)
        mask = (torch.arange(11) < torch.tensor([11, 7])[:, None]).long()
        given: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    else:
        config = transformers.AutoConfig.for_model(name, image_size=8, patch_size=4, **sizes)
        given = {"pixel_values": numbers("images", 2, 3, 8, 8)}
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").double().eval()
    fill(model, name)
    return model, given


def _timm_vit() -> tuple[nn.Module, dict[str, Any]]:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5)
    model.double().eval()
    fill(model, "vit")
    return model, {"x": numbers("images", 2, 3, 8, 8)}


def _encoder() -> tuple[nn.Module, dict[str, Any]]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    fill(model, "encoder")
    padding = torch.arange(9) >= torch.tensor([9, 6])[:, None]
    return model, {"src": numbers("x", 2, 9, 16), "src_key_padding_mask": padding}


# ---- Whole numbers -------------------------------------------------------------------------------


def integers() -> tuple[Tensor, Tensor]:
    """Integer attention, and what its definition gives in real numbers."""
    y_q, y_k = numbers("y_q", 2, 2, 20, 16), numbers("y_k", 2, 2, 50, 16)
    v = (45 * numbers("v", 2, 2, 50, 5)).round().clamp(-127, 127).to(torch.int8)
    ratio, top = torch.sigmoid(numbers("ratio", 2, 4)) / 2, 1 + 0.2 * numbers("top", 2, 4)
    f = top[..., None] * ratio[..., None] ** torch.arange(5)
    exponent = (2 * numbers("exponent", 2, 2, 50)).round().clamp(-6, 6).to(torch.int8)
    scale = torch.tensor([1.5, 0.8], dtype=torch.float64)
    differ = ((y_q < 0)[:, :, :, None] ^ (y_k < 0)[:, :, None]).unflatten(-1, (4, 4)).sum(-1)
    heads, groups = torch.arange(2)[:, None, None, None], torch.arange(4)
    affinity = f[heads, groups, differ].sum(-1) * 2.0 ** exponent.double()[:, :, None]
    exact = scale[:, None, None] * (affinity @ v.double()) / affinity.sum(-1, keepdim=True)
    return integer_attention(y_q, y_k, v, f, scale, exponent), exact.clamp(-127, 127)


class Small(nn.Module):
    """A classifier of token sequences with one `sharp_eco` layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 5)
        fill(self.before, "before")
        fill(self.after, "after")

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after((x + self.layer(x)).mean(dim=1))


def int8() -> Numbers:
    """Logits of a model in int8."""
    model = quantised(
        Small(weighted("sharp_eco", {})).eval(),
        [numbers(f"batch {i}", 4, 20, DIM, dtype=torch.float32) for i in range(3)],
    )
    with torch.no_grad():
        return {"logits": model(numbers("input", 4, 20, DIM, dtype=torch.float32))}


# ---- Cost ----------------------------------------------------------------------------------------


def facts(goldens: Numbers) -> dict[str, Any]:
    """Figures that are no tensors, by name."""
    pyramid = [f"pvt_v2_b{i}" for i in range(5)]
    models = [*pyramid, "twins_svt_small", "text"]
    return {
        "equal codes": equal_codes(goldens),
        "paper": {f"{m} {a}": list(paper_cost(m, a)) for m in models for a in ("softmax", "eco")},
        "tables": paper_tables(),
        "figure 2": {f"{m} {a}": paper_shares(m, a) for m in pyramid for a in ("softmax", "eco")},
        "bitfusion": bitfusion_table(),
    }


# ---- The file ------------------------------------------------------------------------------------


def cases(goldens: Numbers) -> Iterator[tuple[str, Callable[[], Numbers]]]:
    """Every case by name, and the function that computes its tensors."""
    yield from fits()
    yield from operators()
    yield "causal product", product
    yield from layers(goldens)
    yield "released", official
    yield from pyramids()
    yield "int8", int8


def load() -> tuple[Numbers, dict[str, Any]]:
    """The frozen tensors, and the facts."""
    with safe_open(FILE, "pt") as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["facts"])


def main() -> None:
    """Write the file."""
    if FILE.exists() and "--force" not in sys.argv:
        sys.exit(f"{FILE.name} holds what later code is compared with; --force replaces it")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from ecoformer.third_party import repair_torchvision

    repair_torchvision()
    goldens: Numbers = {}
    for name, compute in cases(goldens):
        for part, tensor in compute().items():
            narrow = torch.int8 if part == "codes" else tensor.dtype
            goldens[f"{name}/{part}"] = tensor.detach().to(narrow).contiguous().clone()
    save_file(goldens, FILE, {"facts": json.dumps(facts(goldens), separators=(",", ":"))})
    sys.stdout.write(f"{FILE.name}: {len(goldens)} tensors, {FILE.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
