"""Checks of the operators' arguments: one line that names the argument, its shape and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_WIDTHS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
"""Packed dtypes that say their number of bits; other numbers are packed as int64."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WIDTH_OF = {dtype: bits for bits, dtype in EXACT_WIDTHS.items()}


def check_attention(codes_q: Tensor, codes_k: Tensor, v: Tensor, is_causal: bool, bits: int | None) -> int:
    """Refuse codes and values that do not fit; returns b."""
    check_tensors(codes_q=codes_q, codes_k=codes_k, v=v)
    width = _check_codes(codes_q, codes_k, v, bits)
    if is_causal and codes_q.shape[v.ndim - 2] != v.shape[-2]:
        raise ValueError(
            f"is_causal=True needs as many queries as keys, got codes_q {shape(codes_q)} and v {shape(v)}"
        )
    return width


def packed_width(name: str, packed: Tensor, bits: int | None) -> int:
    """Number of bits of packed codes: `bits`, or what their dtype says."""
    if bits is None:
        bits = _WIDTH_OF.get(packed.dtype)
        if bits is None:
            raise ValueError(f"{name} {shape(packed)} of {packed.dtype} does not say b: pass bits=b")
    widest = 8 * packed.element_size()
    if not 1 <= bits <= widest:
        raise ValueError(f"bits={bits} is out of range for {name} of {packed.dtype}: 1 to {widest}")
    return bits


def shape(x: Tensor) -> str:
    """A tensor's shape as error messages show it."""
    return str(tuple(x.shape))


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's message in one line of about `limit` characters, or its class where it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else f"{line[:limit]} ..."


def check_tensors(**arguments: Tensor) -> None:
    """Refuse what is not a tensor, by its name."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_codes(codes_q: Tensor, codes_k: Tensor, v: Tensor, bits: int | None) -> int:
    """Shapes, dtypes and devices agree; returns b."""
    if v.ndim < 2:
        raise ValueError(f"v must be (..., N, D), got {shape(v)}")
    if v.dtype not in FLOATS:
        raise TypeError(f"v must be fp64, fp32, bf16 or fp16, got {v.dtype} {shape(v)}")
    widths = [_check_code("codes_q", codes_q, v, bits), _check_code("codes_k", codes_k, v, bits)]
    if widths[0] != widths[1]:
        raise ValueError(
            f"codes_q and codes_k must have the same b, got {widths[0]} and {widths[1]} "
            f"from {shape(codes_q)} and {shape(codes_k)}"
        )
    n_keys = codes_k.shape[v.ndim - 2]
    if n_keys != v.shape[-2]:
        raise ValueError(f"codes_k {shape(codes_k)} and v {shape(v)} must have the same number of tokens")
    return widths[0]


def _check_code(name: str, codes: Tensor, v: Tensor, bits: int | None) -> int:
    lead = v.ndim - 2
    packed = codes.dtype in INTEGERS and codes.ndim == v.ndim - 1
    if codes.dtype not in INTEGERS and codes.dtype not in FLOATS:
        raise TypeError(f"{name} must be ±1 or packed integers, got {codes.dtype} {shape(codes)}")
    if not packed and codes.ndim != v.ndim:
        raise ValueError(
            f"{name} must be (..., N, b) of ±1 or (..., N) packed integers beside v {shape(v)}, "
            f"got {codes.dtype} {shape(codes)}"
        )
    if codes.shape[:lead] != v.shape[:lead]:
        raise ValueError(f"{name} {shape(codes)} and v {shape(v)} must agree in all leading dimensions")
    if codes.device != v.device:
        raise ValueError(f"{name} is on {codes.device}, v is on {v.device}: move one of them")
    if packed:
        return packed_width(name, codes, bits)
    if codes.dtype in INTEGERS:
        _check_signs(name, codes)
    width = int(codes.shape[-1])
    if width < 1 or (bits is not None and bits != width):
        contradiction = "" if bits is None else f", but bits={bits}"
        raise ValueError(f"{name} {shape(codes)} has {width} bits{contradiction}")
    return width


def _check_signs(name: str, codes: Tensor) -> None:
    """Integers beside the tokens' own number of dimensions must be ±1, not packed in another layout."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if codes.dtype == torch.uint8 or not (traced or bool((codes.abs() == 1).all())):
        raise ValueError(
            f"{name} {shape(codes)} of {codes.dtype} must hold only +1 and -1; packed codes lack that axis"
        )


def check_mask(mask: Tensor | None, v: Tensor) -> Tensor | None:
    """`key_padding_mask` as (..., N_k) beside v."""
    if mask is None:
        return None
    check_tensors(key_padding_mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be bool, True where a key is padding, got {mask.dtype} {shape(mask)}"
        )
    if mask.device != v.device:
        raise ValueError(f"key_padding_mask is on {mask.device}, v is on {v.device}: move one of them")
    n_keys = v.shape[-2]
    if mask.ndim == v.ndim - 1 and mask.shape == v.shape[:-1]:
        return mask
    if v.ndim == 4 and mask.ndim == 2 and mask.shape == (v.shape[0], n_keys):
        return mask[:, None].expand(v.shape[:-1])
    square = mask.ndim >= 2 and mask.shape[-2:] == (n_keys, n_keys)
    advice = "; linear attention has no N x N mask, use is_causal for causal order" if square else ""
    per_sample = f"(B, N_k) = {(v.shape[0], n_keys)} or " if v.ndim == 4 else ""
    raise ValueError(f"key_padding_mask must be {per_sample}{tuple(v.shape[:-1])}, got {shape(mask)}{advice}")


def check_key_weight(key_weight: Tensor | None, v: Tensor) -> None:
    """Refuse weights of keys that are not (..., N_k) floats beside v."""
    if key_weight is None:
        return
    check_tensors(key_weight=key_weight)
    if key_weight.dtype not in FLOATS or key_weight.shape != v.shape[:-1] or key_weight.device != v.device:
        raise ValueError(
            f"key_weight must be floats of shape {tuple(v.shape[:-1])} on {v.device}, one for each key of v, "
            f"got {key_weight.dtype} {shape(key_weight)} on {key_weight.device}"
        )
