"""What one ATen operator costs: the conventions of the exact accounting.

Arithmetic; `RULES` lists every operator:
- matrix products and convolutions: M N K mul and M N K add; a bias is one add an output;
- transcendental functions are one exp each; a division is one mul; neg and abs cost nothing;
- comparisons, selections, signs and rounding are one compare each, sorting n ceil(log2 n);
- softmax over n: n compare (maximum), n add, n exp, n add (sum), n mul (division);
- layer_norm, group_norm over n: mean (n add, 1 mul), centring (n add), variance (n mul, n add, 1 mul),
  epsilon (1 add), root (1 exp), scaling (n mul); a weight is n mul, a bias n add;
- batch_norm in eval: 2 mul and 2 add an element; epsilon (1 add) and root (1 exp) a channel;
- gather, index, embedding, scatter: one lookup an element moved (scatter_add, index_add: also one add);
- attention (SDPA): products of queries and keys, their scaling (one mul a pair), softmax, weighted sum; a
  mask is one add a pair, one compare if it is bool. Masked and causal pairs count, whichever kernel runs.
- integer attention counts as kernels compute it (`cpu_kernels.py`); packed signs are two compares each.

Traffic in bytes: every tensor operand is read once and every output is written once, in its dtype.
- A broadcast or overlapping view is read only where it has elements of its own.
- A table (gather, index, embedding) is read only where it is looked up.
- Zero-dimensional tensors are scalars in a register, and so are the statistics of a norm: free.
- Views and metadata are free. Copies (clone, cat, pad, casts) and fills move bytes and do nothing else.
- Attention is one fused operator: its scores never reach memory.
- A layer of integers in fused kernels (`moved_by_kernels`): sums stay in registers, and nothing is copied.

Width: operators compute in the widest dtype of their operands and result, floating point before integers;
indices, masks and scalars do not decide. int64 counts as int32, fp64 as fp32, uint8 and bool as int8.
Products of int8 are summed in int32.

Operators without a rule are reported as uncounted, never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ecoformer.accounting.cpu_kernels import integer_counts
from ecoformer.operations import Counts, mac


@dataclass(frozen=True)
class Operation:
    """One call of an operator: its arguments by name, and its outputs."""

    name: str
    args: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def n(self) -> int:
        """Elements of the first output."""
        return self.outputs[0].numel()

    @property
    def inputs(self) -> int:
        """Elements of the operand `self`."""
        return int(self.args["self"].numel())

    @property
    def width(self) -> str:
        """What the operator computes in."""
        operands = tensors([value for key, value in self.args.items() if key not in ("index", "indices")])
        return width_of(*operands, self.outputs[0])

    @property
    def in_place(self) -> bool:
        """Whether the operator writes to its operand `self`."""
        return self.args.get("self") is self.outputs[0]


Rule = Callable[[Operation], Counts]


def cost_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Counts | None:
    """What this call costs, or None if the operator has no rule."""
    name = name_of(func)
    if name in FREE:
        return Counts()
    rule = RULES.get(name)
    if rule is None:
        return None
    names, defaults = _signature(func)
    bound = defaults | dict(zip(names, args, strict=False))
    bound |= {key: value for key, value in kwargs.items() if key != "out"}
    op = Operation(name, bound, tuple(tensors(out)))
    if not op.outputs:
        return Counts()
    counts = rule(op)
    if not counts.narrow:  # the rule has not said otherwise
        counts = counts.of(op.width)
    return counts + Counts(bytes=TRAFFIC.get(name, _all_operands)(op))


@cache
def _signature(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of all arguments, and their defaults."""
    schema = func._schema.arguments
    defaults = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    return tuple(arg.name for arg in schema), defaults


@cache
def name_of(func: OpOverload) -> str:
    """The operator without its overload; in-place operators share the name of their twins."""
    name: str = func._opname
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return f"{func.namespace}.{name}"


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


_WIDTHS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int16: "int16"}
_WIDTHS |= dict.fromkeys((torch.int32, torch.int64), "int32")
_WIDTHS |= dict.fromkeys((torch.int8, torch.uint8, torch.bool), "int8")


def width_of(*operands: Tensor) -> str:
    """The widest of these tensors, floating point before integers; scalars do not decide."""
    dtypes = [x.dtype for x in operands if x.ndim] or [x.dtype for x in operands]
    return _WIDTHS.get(reduce(torch.promote_types, dtypes), "fp32")


def read(value: Any) -> int:
    """Bytes read of an operand: elements that a view repeats are read once, scalars not at all."""
    total = 0
    for tensor in tensors(value):
        if tensor.ndim and tensor.numel():
            own = math.prod(s for s, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
            span = 1 + sum((s - 1) * step for s, step in zip(tensor.shape, tensor.stride(), strict=True))
            total += min(own, span) * tensor.element_size()
    return total


def written(*outputs: Tensor) -> int:
    """Bytes written."""
    return sum(out.numel() * out.element_size() for out in outputs if out.ndim)


def _all_operands(op: Operation) -> int:
    return sum(read(value) for value in op.args.values()) + written(*op.outputs)


def _first_output(op: Operation) -> int:
    """Statistics beside the first output stay in registers, and running ones are operands."""
    return sum(read(value) for value in op.args.values()) + written(op.outputs[0])


def _overwritten(op: Operation) -> int:
    """A fill or a copy: `self` gives the shape or the memory and is not read."""
    return read(op.args.get("src")) + written(*op.outputs)


def moved_by_kernels(func: OpOverload, operands: Any, out: Any) -> int:
    """Bytes that one step of an integer layer moves where it is fused with its neighbours.

    Only int8 numbers and codes reach memory: sums and what they are scaled to stay in registers.
    """
    name, outputs = name_of(func), list(tensors(out))
    if name == "ecoformer.integer_attention":
        return read(operands) + written(*outputs)
    if name == "ecoformer.pack_signs":
        return written(*outputs)
    if name in _COPIES:
        return 0
    numbers = [x for x in tensors(operands) if x.dtype == torch.int8]
    return read(numbers) + written(*(x for x in outputs if x.dtype == torch.int8))


def _looked_up(op: Operation) -> int:
    """The table is read where it is looked up."""
    indices = next(op.args[key] for key in ("index", "indices") if key in op.args)
    return 2 * written(op.outputs[0]) + read(indices)


def _scattered(op: Operation) -> int:
    """Out of place, all of `self` is copied first; sums read what they add to."""
    moved = _moved(op) * op.outputs[0].element_size()
    sources = read(op.args["index"]) + read([op.args.get(key) for key in ("src", "source")])
    base = moved if op.in_place else read(op.args["self"]) + written(op.outputs[0])
    return base + sources + (moved if "add" in op.name else 0)


def each(**kinds: Any) -> Rule:
    """A number of operations of each kind per output element."""
    one = Counts(**kinds)
    return lambda op: one * op.n


def each_input(**kinds: Any) -> Rule:
    """A number of operations of each kind per input element."""
    one = Counts(**kinds)
    return lambda op: one * op.inputs


def nothing(op: Operation) -> Counts:
    """Bytes are moved, nothing is computed."""
    return Counts()


def _scaled_add(op: Operation) -> Counts:
    return Counts(add=op.n, mul=op.n if op.args.get("alpha", 1) != 1 else 0)


def _product(left: str) -> Rule:
    return lambda op: mac(op.n * op.args[left].shape[-1])


def _product_and_sum(left: str) -> Rule:
    def rule(op: Operation) -> Counts:
        factors = sum(op.args.get(key, 1) != 1 for key in ("alpha", "beta"))
        return mac(op.n * op.args[left].shape[-1]) + Counts(add=op.n, mul=factors * op.n)

    return rule


def _convolution(op: Operation) -> Counts:
    positions = op.args["input"].numel() if op.args["transposed"] else op.n
    bias = Counts() if op.args["bias"] is None else Counts(add=op.n)
    return mac(positions * math.prod(op.args["weight"].shape[1:])) + bias


def _integer_products(terms: int) -> Counts:
    """Of int8 numbers; sums have 32 bits."""
    return Counts(mul=terms).of("int8") + Counts(add=terms).of("int32")


def _integer_attention(op: Operation) -> Counts:
    batch, heads, keys, channels = op.args["v"].shape
    _, groups, levels = op.args["levels"].shape
    weighted = op.args.get("exponent") is not None
    return integer_counts(batch * heads, op.outputs[0].shape[2], keys, channels, groups, levels - 1, weighted)


def _variance(op: Operation) -> Counts:
    root = op.n if "std" in op.name else 0
    return Counts(add=3 * op.inputs, mul=op.inputs + 2 * op.n, exp=root)


def _power(op: Operation) -> Counts:
    exponent = op.args.get("exponent")
    if not isinstance(exponent, (int, float)) or exponent != int(exponent):
        return Counts(exp=op.n)
    return Counts(mul=op.n * (max(abs(int(exponent)) - 1, 0) + (exponent < 0)))


def _sort(op: Operation) -> Counts:
    x = op.args["self"]
    length = x.shape[op.args.get("dim", -1)] if x.ndim else 1
    return Counts(compare=op.inputs * (length - 1).bit_length() if length else 0)


def softmax_counts(n: int) -> Counts:
    """Softmax of n numbers in total, in any rows."""
    return Counts(compare=n, add=2 * n, exp=n, mul=n)


def _log_softmax(op: Operation) -> Counts:
    rows = op.n // max(op.args["self"].shape[op.args["dim"]], 1) if op.args["self"].ndim else 1
    return Counts(compare=op.n, add=3 * op.n, exp=op.n + rows)


def _logsumexp(op: Operation) -> Counts:
    return Counts(compare=op.inputs, add=2 * op.inputs + op.n, exp=op.inputs + op.n)


def normalisation_counts(n: int, rows: int, weight: bool, bias: bool) -> Counts:
    """Layer or group normalisation of n numbers in total, in `rows` rows."""
    return Counts(mul=2 * n + 2 * rows + weight * n, add=3 * n + rows + bias * n, exp=rows)


def _normalisation(op: Operation) -> Counts:
    if "group" in op.args:
        rows = op.args["N"] * op.args["group"]
    else:
        rows = op.n // max(math.prod(op.args["normalized_shape"]), 1)
    return normalisation_counts(op.n, rows, op.args["weight"] is not None, op.args["bias"] is not None)


def _batch_norm(op: Operation) -> Counts:
    channels = op.args["input"].shape[1]
    if op.args.get("training", False):  # the batch's own statistics come first
        return Counts(mul=3 * op.n + 2 * channels, add=5 * op.n + channels, exp=channels)
    return Counts(mul=2 * op.n, add=2 * op.n + channels, exp=channels)


def _norm(op: Operation) -> Counts:
    order = op.args.get("ord", op.args.get("p", 2))
    if order == 2:
        return Counts(mul=op.inputs, add=op.inputs, exp=op.n)
    if order == 1:
        return Counts(add=op.inputs)
    if order in (math.inf, -math.inf, 0):
        return Counts(compare=op.inputs)
    return Counts(exp=op.inputs + op.n, add=op.inputs)


def _gelu(op: Operation) -> Counts:
    one = Counts(mul=6, add=2, exp=1) if op.args["approximate"] == "tanh" else Counts(mul=3, add=1, exp=1)
    return one * op.n


def _window(op: Operation) -> int:
    size = op.args["kernel_size"]
    return int(math.prod(size) if len(size) == 2 else size[0] ** 2)


def _adaptive(op: Operation) -> Counts:
    total = op.n // math.prod(op.outputs[0].shape[-2:]) if op.n else 0
    for length, cells in zip(op.args["self"].shape[-2:], op.outputs[0].shape[-2:], strict=True):
        total *= sum(-(-(i + 1) * length // cells) - i * length // cells for i in range(cells))
    return Counts(add=total, mul=op.n)


def _moved(op: Operation) -> int:
    source = op.args.get("src", op.args.get("source"))
    return int((source if isinstance(source, Tensor) else op.args["index"]).numel())


def _scatter(op: Operation) -> Counts:
    return Counts(lookup=_moved(op), add=_moved(op) if "add" in op.name else 0)


def attention_counts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Counts:
    """Fused attention without its traffic, whichever kernel runs."""
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    is_bool = mask is not None and mask.dtype == torch.bool
    masking = Counts() if mask is None else Counts(compare=pairs) if is_bool else Counts(add=pairs)
    products = mac(pairs * (q.shape[-1] + v.shape[-1]))
    return products + Counts(mul=pairs) + softmax_counts(pairs) + masking


def _attention(op: Operation) -> Counts:
    mask = op.args.get("attn_mask", op.args.get("attn_bias"))
    return attention_counts(op.args["query"], op.args["key"], op.args["value"], mask)


def _aten(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


_FILLS = (
    "zeros ones full arange eye fill zero new_zeros new_ones new_full zeros_like ones_like full_like linspace"
)
_COMPARISONS = (
    "eq ne lt le gt ge isnan isinf isfinite where masked_fill sign sgn floor ceil round trunc relu threshold "
    "maximum minimum clamp_min clamp_max logical_not logical_and logical_or logical_xor"
)
_LOOKUPS = "gather index index_select take embedding"
_SHIFTS = "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__"
_SCATTERS = "scatter scatter_add index_add index_copy"
_NORMS = "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit_no_training"
_ATTENTION = (
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)

_COPIES = frozenset(_aten("clone copy cat constant_pad_nd", nothing))
INTEGER_PRODUCTS = frozenset({"aten._int_mm", "ecoformer.integer_conv2d"})

FREE = frozenset(
    _aten(
        "_unsafe_view as_strided empty empty_like empty_strided new_empty new_empty_strided scalar_tensor "
        "lift_fresh _local_scalar_dense detach resize set",
        nothing,
    )
)
"""Operators that neither compute nor move anything, besides views."""

RULES: dict[str, Rule] = {
    **_aten("mm bmm mv dot", _product("self")),
    **_aten("addmm", _product_and_sum("mat1")),
    **_aten("baddbmm", _product_and_sum("batch1")),
    **_aten("addmv", _product_and_sum("mat")),
    **_aten("convolution", _convolution),
    **_aten("mul div reciprocal remainder fmod floor_divide cumprod", each(mul=1)),
    **_aten("prod", each_input(mul=1)),
    **_aten("add sub rsub", _scaled_add),
    **_aten("addcmul addcdiv", each(mul=2, add=1)),
    **_aten("lerp", each(mul=1, add=2)),
    **_aten("sum cumsum", each_input(add=1)),
    **_aten("mean", lambda op: Counts(add=op.inputs, mul=op.n)),
    **_aten("var std var_mean std_mean", _variance),
    **_aten("pow", _power),
    **_aten("exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf erfc sqrt rsqrt atan2", each(exp=1)),
    **_aten("neg abs", nothing),
    **_aten(_COMPARISONS, each(compare=1)),
    **_aten("clamp", lambda op: Counts(compare=op.n * sum(op.args[k] is not None for k in ("min", "max")))),
    **_aten("hardtanh", each(compare=2)),
    **_aten("max min amax amin argmax argmin any all nonzero", each_input(compare=1)),
    **_aten("sort topk", _sort),
    **_aten(f"bitwise_and bitwise_or bitwise_xor bitwise_not frexp {_SHIFTS}", each(shift=1)),
    **_aten(_LOOKUPS, each(lookup=1)),
    **_aten(_SCATTERS, _scatter),
    **_aten("_softmax", lambda op: softmax_counts(op.n)),
    **_aten("_safe_softmax", lambda op: softmax_counts(op.n) + Counts(compare=3 * op.n)),
    **_aten("_log_softmax", _log_softmax),
    **_aten("logsumexp", _logsumexp),
    **_aten("native_layer_norm native_group_norm", _normalisation),
    **_aten("native_batch_norm _native_batch_norm_legit_no_training", _batch_norm),
    **_aten("linalg_vector_norm norm", _norm),
    **_aten("sigmoid", each(exp=1, add=1, mul=1)),
    **_aten("silu", each(exp=1, add=1, mul=2)),
    **_aten("hardswish", each(add=1, compare=2, mul=2)),
    **_aten("hardsigmoid", each(add=1, compare=2, mul=1)),
    **_aten("elu", each(compare=1, exp=1, add=1, mul=1)),
    **_aten("leaky_relu", each(compare=1, mul=1)),
    **_aten("softplus", each(exp=2, add=1)),
    **_aten("gelu", _gelu),
    **_aten("avg_pool2d", lambda op: Counts(add=op.n * _window(op), mul=op.n)),
    **_aten("_adaptive_avg_pool2d", _adaptive),
    **_aten("max_pool2d_with_indices", lambda op: Counts(compare=op.n * _window(op))),
    **_aten("upsample_nearest2d", each(lookup=1)),
    **_aten("upsample_bilinear2d", each(lookup=4, mul=4, add=3)),
    **_aten(
        "clone copy _to_copy cat stack constant_pad_nd reflection_pad2d replication_pad2d repeat", nothing
    ),
    **_aten("roll flip tril triu pixel_shuffle im2col unfold_copy", nothing),
    **_aten(_FILLS, nothing),
    **_aten(_ATTENTION, _attention),
    **_aten("_int_mm", lambda op: _integer_products(op.n * op.args["self"].shape[-1])),
    "ecoformer.integer_conv2d": lambda op: _integer_products(op.n * op.args["weight"][0].numel()),
    "ecoformer.integer_attention": _integer_attention,
    "ecoformer.pack_signs": lambda op: Counts(compare=2 * next(tensors([*op.args.values()])).numel()),
}
"""Arithmetic by operator."""

TRAFFIC: dict[str, Callable[[Operation], int]] = {
    **dict.fromkeys(_aten(_FILLS, nothing), _overwritten),
    **dict.fromkeys(_aten(_LOOKUPS, nothing), _looked_up),
    **dict.fromkeys(_aten(_SCATTERS, nothing), _scattered),
    **dict.fromkeys(_aten(f"{_NORMS} {_ATTENTION}", nothing), _first_output),
    "aten.copy": _overwritten,
}
"""Bytes of operators that do not simply read every operand and write every output."""
