"""What one operator costs in the exact accounting.

- Matrix products, convolutions and softmax attention are the multiply-accumulates that the formulas of
  `torch.utils.flop_counter` have; biases are free. Softmax attention also takes one exponential a score.
- Hashed attention is `hashed_attention`, whatever computes it.
- Copies and fills compute nothing.
- Every other operator is one operation an element, of one kind: `KINDS`, or else an addition. The elements
  are those of its output, or of its first operand where that has more, as in a sum.

Bytes are those of all operands, read once, and of all outputs, written once, in their dtypes. Views and
scalars are free, a broadcast operand is read only where it has elements of its own, and a table only where it
is looked up. Attention of either kind and layers of whole numbers are one operator each: what is between
their inputs and outputs never reaches memory.

Operators compute in the widest dtype of their operands and result, floating point before integers. int64
counts as int32, fp64 as fp32, uint8 and bool as int8. Products of int8 are summed in int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ecoformer.operations import Counts, mac

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FREE = _names(
    "empty empty_like empty_strided new_empty new_empty_strided scalar_tensor lift_fresh detach _unsafe_view "
    "as_strided _local_scalar_dense resize set"
)
_FILLS = _names(
    "zeros ones full arange eye linspace fill zero new_zeros new_ones new_full zeros_like ones_like full_like"
)
_COPIES = _names(
    "clone copy _to_copy cat stack constant_pad_nd reflection_pad2d replication_pad2d repeat roll flip tril "
    "triu pixel_shuffle im2col unfold_copy neg abs"
)
_TABLES = _names("gather index index_select take embedding")
INTEGER_OPERATORS = _names("integer_conv2d pack_signs integer_attention")
"""Ours of whole numbers; all others of ours are run as the plain PyTorch that they wrap."""
_VECTORS = {"mv": 0, "dot": 0, "vdot": 0, "addmv": 1}
"""Products with a vector, for which PyTorch has no formula, and the position of the matrix."""

KINDS: dict[str, frozenset[str]] = {
    "mul": _names(
        "mul div reciprocal remainder fmod floor_divide pow prod cumprod addcmul addcdiv lerp "
        "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit_no_training"
    ),
    "exp": _names(
        "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf erfc sqrt rsqrt atan2 sigmoid silu gelu "
        "softplus elu hardswish hardsigmoid _softmax _safe_softmax _log_softmax logsumexp"
    ),
    "compare": _names(
        "eq ne lt le gt ge isnan isinf isfinite where masked_fill sign sgn floor ceil round trunc relu "
        "leaky_relu threshold maximum minimum clamp clamp_min clamp_max hardtanh max min amax amin argmax "
        "argmin any all nonzero sort topk logical_not logical_and logical_or logical_xor "
        "max_pool2d_with_indices"
    ),
    "lookup": _names("scatter scatter_add index_add index_copy index_put upsample_nearest2d"),
}
"""Operators that are not additions, by kind."""

_WIDTHS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int16: "int16"}
_WIDTHS |= dict.fromkeys((torch.int32, torch.int64), "int32")
_WIDTHS |= dict.fromkeys((torch.int8, torch.uint8, torch.bool), "int8")


def cost_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Counts | None:
    """What this call costs; None if the operator is not one of PyTorch's or ours."""
    name, outputs = name_of(func), list(tensors(out))
    namespace, _, name = name.partition(".")
    if not outputs or (namespace == "aten" and name in _FREE):
        return Counts()
    outputs = outputs[:1] if "native" in name else outputs  # a norm's statistics stay in registers
    operands = [*tensors(args), *tensors(kwargs)]
    moved = read(operands) + written(*outputs)
    if namespace == "ecoformer":
        return _ours(name, args, outputs[0]) + Counts(bytes=moved)
    if namespace != "aten":
        return None
    if name in _FILLS:
        return Counts(bytes=written(*outputs))
    if name in _COPIES:
        return Counts(bytes=read(operands[1:]) + written(*outputs) if name == "copy" else moved)
    if name == "_int_mm":
        return _of_int8(_products(aten.mm, args, {}, out)) + Counts(bytes=moved)
    width = width_of(*operands, outputs[0])
    if func.overloadpacket in _formulas():
        counts = mac(_products(func.overloadpacket, args, kwargs, out))
    elif name in _VECTORS:
        counts = mac(operands[_VECTORS[name]].numel())
    elif name in _TABLES:
        counts = Counts(lookup=outputs[0].numel())
        moved = 2 * written(outputs[0]) + read(operands[1:])
    else:
        elements = max(x.numel() for x in (outputs[0], *operands[:1]))
        kind = next((kind for kind, names in KINDS.items() if name in names), "add")
        number: dict[str, Any] = {kind: elements}
        counts = Counts(**number)
    return counts.of(width) + Counts(bytes=moved)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Counts:
    """Two products, and one exponential a score. Masked and causal pairs count."""
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return mac(scores * (query.shape[-1] + value.shape[-1])) + Counts(exp=scores)


def hashed_attention(
    queries: int, keys: int, channels: int, groups: int, size: int, *, weighted: bool, is_causal: bool = False
) -> Counts:
    """Hashed attention of one head by its definition, from codes to output.

    A code is cut into `groups` of `size` bits, and the bits of a group pick one of 2^size rows. A row holds
    the sum of the values of its keys and their number: D + 1 numbers.

    - scatter: a key adds its value and a 1 to the row that each of its groups picks: a lookup and an addition
      a number. If it has a weight, a power of two, it first shifts its D channels.
    - mix: rows of a group exchange what they hold, so that each holds the sums for the queries that pick it.
      This takes one step a bit, a multiply-accumulate a number, and one multiplication by the affinity. It
      happens once a head. In causal order, the rows change with every key, so a query mixes those that it
      picks, from all 2^size rows of their groups.
    - gather: a query adds up the rows that its groups pick: a lookup and an addition a number.
    - division: a query takes one reciprocal and multiplies D channels.
    """
    picked = groups * (channels + 1)
    token = Counts(lookup=picked, add=picked)
    steps = mac(queries) if is_causal else mac(size) + Counts(mul=1)
    shifts = Counts(shift=channels * keys if weighted else 0)
    return token * (keys + queries) + steps * (picked << size) + shifts + Counts(mul=(channels + 1) * queries)


def name_of(func: OpOverload) -> str:
    """The operator without its overload; in-place operators share the name of their twins."""
    name: str = func._opname
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return f"{func.namespace}.{name}"


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument or a result."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def width_of(*operands: Tensor) -> str:
    """The widest of these tensors, floating point before integers; scalars do not decide."""
    dtypes = [x.dtype for x in operands if x.ndim] or [x.dtype for x in operands]
    return _WIDTHS.get(reduce(torch.promote_types, dtypes), "fp32")


def read(value: Any) -> int:
    """Bytes read of operands: elements that a view repeats are read once, scalars not at all."""
    total = 0
    for x in tensors(value):
        if x.ndim and x.numel():
            own = math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)
            span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
            total += min(own, span) * x.element_size()
    return total


def written(*outputs: Tensor) -> int:
    """Bytes written."""
    return sum(out.numel() * out.element_size() for out in outputs if out.ndim)


@cache
def _formulas() -> dict[Any, Any]:
    """PyTorch's, imported late because Triton comes with them."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _products(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Multiply-accumulates by PyTorch's formula, which counts two operations for each."""
    return int(_formulas()[packet](*args, **kwargs, out_val=out)) // 2


def _of_int8(products: int) -> Counts:
    return Counts(mul=products).of("int8") + Counts(add=products).of("int32")


def _ours(name: str, args: tuple[Any, ...], out: Tensor) -> Counts:
    """What one of `INTEGER_OPERATORS` computes."""
    if name == "integer_conv2d":
        x, weight = args[:2]
        return _of_int8(_products(aten.convolution, (x, weight, None, [], [], [], False), {}, out))
    if name == "pack_signs":
        return Counts(compare=args[0].numel()).of("int32")
    codes_q, codes_k, v, levels, _, exponent, _ = args
    sizes = codes_q.shape[-1], codes_k.shape[-1], v.shape[-1], levels.shape[1], levels.shape[2] - 1
    heads: int = math.prod(v.shape[:2])
    return hashed_attention(*sizes, weighted=exponent is not None).of("int32") * heads
