"""The contestants of `bench attention`: operators from tokens to output on heads (B, H, N, D)."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecoformer.arguments import one_line
from ecoformer.attention import (
    Attention,
    HashedAttention,
    ReformerAttention,
    attention_class,
    create_attention,
)
from ecoformer.backends.choice import use_backend
from ecoformer.benchmarking.backends import hashed_backends
from ecoformer.benchmarking.checking import Call, hashed_truth
from ecoformer.benchmarking.compiling import compiled
from ecoformer.benchmarking.explicit import ExplicitAttention
from ecoformer.hashing import FitOptions

QUICK_FIT = FitOptions(steps=5, pairs=5)
"""How good hash functions are has no influence on their time."""


@dataclass(frozen=True)
class Operator:
    """One contestant.

    Attributes:
        mechanism: its name.
        backend: what computes it.
        call: queries, keys and values to output.
        truth: the same in fp64 and, where there is such a thing, dense; for short sequences.
        against: what `truth` is, in words.
        whole: the same in a wider dtype in linear time, for the whole shape; None where there is none.
        shared_qk: whether queries are also the keys.
        sorts: whether it sorts by hashes, so that rounding may move single tokens.
        sliced: whether it can be called with other lengths at no great cost.
    """

    mechanism: str
    backend: str
    call: Call
    truth: Call
    against: str
    whole: Call | None = None
    shared_qk: bool = False
    sorts: bool = False
    sliced: bool = True


@dataclass(frozen=True)
class Setting:
    """What is measured: a shape, and how."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = False
    backward: bool = False
    compiled: bool = False
    seed: int = 0
    graphs: bool = False


def build_layer(mechanism: str, setting: Setting, **options: Any) -> Attention:
    """A layer with default settings but for `options`; its hash functions are fitted to random tokens."""
    _, heads, tokens, dim = setting.shape
    if mechanism == "explicit":
        layer: Attention = ExplicitAttention(heads * dim, heads)
    else:
        if attention_class(mechanism).sized_by_tokens:
            options["seq_len"] = tokens
        layer = create_attention(mechanism, heads * dim, heads, **options)
    layer = layer.to(setting.device, setting.dtype).eval()
    if isinstance(layer, HashedAttention):
        generator = torch.Generator().manual_seed(setting.seed)
        layer.hasher.fit(
            torch.randn(2, heads, 128, dim, generator=generator).to(setting.device), options=QUICK_FIT
        )
    return layer


def operators_of(layer: Attention, setting: Setting) -> list[Operator]:
    """The contestants that one layer makes: hashed attention once a backend."""
    if isinstance(layer, HashedAttention):
        return _hashed(layer, setting)
    if layer.name in ("softmax", "explicit"):
        backend = "sdpa" if layer.name == "softmax" else "N x N matrix"
        truth = dense_softmax(setting.is_causal)
        return [Operator(layer.name, backend, _attend(layer, setting), truth, "dense softmax in fp64")]
    wide = _attend(copy.deepcopy(layer).double(), setting, torch.float64)
    return [
        Operator(
            layer.name,
            "eager",
            _attend(layer, setting),
            wide,
            "itself in fp64",
            shared_qk=layer.shared_qk,
            sorts=isinstance(layer, ReformerAttention),
        )
    ]


def _hashed(layer: HashedAttention, setting: Setting) -> list[Operator]:
    truth = hashed_truth(layer, setting.is_causal)
    many = math.prod(setting.shape) > 1 << 26
    wide_dtype = torch.float32 if many else torch.float64
    wide_layer = layer if many else copy.deepcopy(layer).double()
    whole = _in_backend("eager", _attend(wide_layer, setting, wide_dtype))
    plain = _attend(layer, setting)

    def operator(backend: str, call: Call, sliced: bool = True) -> Operator:
        against = "the reference in fp64" + ("" if sliced else ", by way of eager")
        return Operator(layer.name, backend, call, truth, against, whole, layer.shared_qk, sliced=sliced)

    able = hashed_backends([layer.hasher], setting.device, setting.backward, setting.dtype)
    made = [operator(name, _in_backend(name, plain)) for name in able]
    if setting.compiled:
        # Every length would be compiled anew, so that it is checked at its own only.
        made.append(operator("eager, compiled", _in_backend("eager", compiled(plain)), sliced=False))
    return made


def _attend(layer: Attention, setting: Setting, dtype: torch.dtype | None = None) -> Call:
    is_causal = setting.is_causal
    if dtype is None:
        return lambda q, k, v: layer.attend(q, k, v, None, is_causal)
    return lambda q, k, v: layer.attend(*_cast(dtype, q, k, v), None, is_causal)


def _cast(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = q.to(dtype)
    return wide, (wide if k is q else k.to(dtype)), v.to(dtype)


def _in_backend(name: str, call: Call) -> Call:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with use_backend(name):
            return call(q, k, v)

    return run


def dense_softmax(is_causal: bool) -> Call:
    """Eq. (2) of the paper in fp64, with all its weights."""

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return scores.softmax(dim=-1) @ v.double()

    return truth


def flash_linear_attention(setting: Setting) -> tuple[Operator | None, str]:
    """The chunked linear attention of flash-linear-attention, which is causal; or None and why not."""
    try:
        if importlib.util.find_spec("fla") is None:
            return None, "flash-linear-attention (fla) is not installed, so that it is not among the peers"
        chunked: Callable[..., Any] = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except Exception as error:
        why = one_line(error, 120)
        return None, f"flash-linear-attention (fla) is installed but cannot be imported: {why}"
    if setting.device.type != "cuda":
        return None, "flash-linear-attention (fla) runs on GPUs only, so that it is not among the peers"

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = chunked(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)[0]
        return out.transpose(1, 2)

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.double() @ k.double().mT).tril() @ v.double()

    note = "fla_linear is flash-linear-attention's: causal in any case, without feature map or normalisation"
    return Operator("fla_linear", "fla", call, truth, "dense linear attention in fp64"), note
