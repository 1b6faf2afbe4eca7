"""The paper's accounting: what its cost columns count, and what they leave out.

Multiply-accumulates of linear layers (their biases are free), of convolutions (theirs are not) and of
attention; two a number for LayerNorm. Activations, softmax, residual sums, the squares of the hash kernel and
all memory traffic are free. `docs/cost.md` sets this beside what is really executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from ecoformer.accounting.counts import Counts, mac
from ecoformer.accounting.paper_mechanisms import attention_to, mechanism_rule
from ecoformer.accounting.shapes import Call
from ecoformer.attention import Attention
from ecoformer.attention.local import LocalBranch
from ecoformer.conversion.layers import Found, find_layers


def linear(call: Call, module: Any) -> Counts:
    """`prod(input) * out_features`."""
    return mac(math.prod(call.inputs) * module.out_features)


def convolution(call: Call, module: Any) -> Counts:
    """One product for each weight and output position, and one for a bias."""
    positions = math.prod(call.output) // call.output[1]
    weights = math.prod(module.kernel_size) * module.in_channels // module.groups * module.out_channels
    return mac((weights + (module.out_channels if module.bias is not None else 0)) * positions)


def layer_norm(call: Call, module: Any) -> Counts:
    """Twice a number."""
    return mac(2 * math.prod(call.inputs))


def local_branch(call: Call, module: Any) -> Counts:
    """Depth-wise: one product for each tap and number, tokens before an image included; no bias."""
    return mac(math.prod(call.output) * math.prod(module.sizes))


RULES: dict[type[nn.Module], Callable[[Call, Any], Counts]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.LayerNorm: layer_norm,
    LocalBranch: local_branch,
}


def rows(model: nn.Module, calls: list[Call]) -> tuple[list[tuple[str, str, Any, Counts]], list[str]]:
    """(name, kind, part, counts) of every layer that is counted, and the names of those that are unknown."""
    layers = find_layers(model)
    foreign = {f.layer: f for f in layers if not f.ours and f.source is not None}
    inside = [f"{f.name}." if f.name else "" for f in layers]
    found: list[tuple[str, str, Any, Counts]] = []
    for call in calls:
        part = part_of(call.name, inside)
        rule = RULES.get(type(call.module)) or next(
            (rule for cls, rule in RULES.items() if isinstance(call.module, cls)), None
        )
        if rule is not None:
            found.append((call.name, type(call.module).__name__, part, rule(call, call.module)))
        elif isinstance(call.module, Attention):
            of_mechanism = mechanism_rule(call.module)
            if of_mechanism is not None:
                counts = of_mechanism(call.module, call.inputs[-2]) * call.inputs[0]
                found.append((call.name, call.module.name, "attention", counts))
        elif call.module in foreign:
            layer = foreign[call.module]
            found.append((call.name, layer.kind, "attention", _foreign(call, layer, calls)))
    return found, _unknown(calls, foreign)


def _foreign(call: Call, found: Found, calls: list[Call]) -> Counts:
    """Softmax attention of another library; what the keys' projection is given tells their number."""
    if found.source is None:
        raise TypeError(f"{found.name} has no projections")
    parts = {c.name.removeprefix(f"{call.name}."): c for c in calls if c.name.startswith(f"{call.name}.")}
    keys = next((parts[name] for name in ("kv", "qkv", "key", "k_proj", "k_lin") if name in parts), call)
    queries, seen = math.prod(call.inputs[:-1]), math.prod(keys.inputs[:-1])
    window = getattr(found.layer, "ws", None)
    if isinstance(window, int):  # windows, padded where they do not fit the map
        queries, each = seen, window**2
    else:
        each = seen // call.inputs[0]
    return attention_to(queries, each, found.source.dim, found.source.num_heads)


def part_of(name: str, attention_layers: list[str]) -> str:
    """Attention, the feed-forward part, or the rest."""
    if name.startswith(tuple(attention_layers)) and attention_layers:
        return "attention"
    words = set(name.split("."))
    return "ffn" if words & {"mlp", "ffn", "feed_forward", "intermediate", "output"} else "other"


def _unknown(calls: list[Call], foreign: dict[nn.Module, Found]) -> list[str]:
    """Modules with parameters of their own, or mechanisms, that no rule counts."""
    names = []
    for call in calls:
        module = call.module
        if type(module) in RULES or isinstance(module, (*RULES, nn.Embedding)) or module in foreign:
            continue
        if isinstance(module, Attention):
            if mechanism_rule(module) is None:
                names.append(f"{call.name} ({module.name})")
        elif list(module.parameters(recurse=False)) and list(module.children()) == []:
            names.append(f"{call.name} ({type(module).__name__})")
    return names
