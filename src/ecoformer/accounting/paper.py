"""The paper's accounting: what its cost columns count, and what they leave out.

Multiply-accumulates of linear layers (their biases are free), of convolutions (theirs are not) and of
attention; two a number for LayerNorm. Activations, softmax, residual sums, the squares of the hash kernel and
all memory traffic are free. `docs/cost.md` sets this beside what is really executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ecoformer.accounting.counts import Counts, mac
from ecoformer.accounting.foreign import attending, with_parts
from ecoformer.accounting.paper_mechanisms import attention_to, mechanism_rule
from ecoformer.accounting.parts import Parts
from ecoformer.accounting.shapes import Call
from ecoformer.attention import Attention
from ecoformer.attention.local import LocalBranch
from ecoformer.conversion.layers import Found, find_layers


def linear(call: Call, module: Any) -> Counts:
    """`prod(input) * out_features`."""
    return mac(math.prod(call.inputs) * module.out_features)


def convolution(call: Call, module: Any) -> Counts:
    """One product for each weight and output position, and one for a bias."""
    positions = math.prod(call.output) // module.out_channels
    weights = math.prod(module.kernel_size) * module.in_channels // module.groups * module.out_channels
    return mac((weights + (module.out_channels if module.bias is not None else 0)) * positions)


def layer_norm(call: Call, module: Any) -> Counts:
    """Twice a number."""
    return mac(2 * math.prod(call.inputs))


def local_branch(call: Call, module: Any) -> Counts:
    """Depth-wise: one product for each tap and number, without a bias; tokens before an image have none."""
    batch, tokens, dim = call.output
    if len(module.sizes) == 2:
        tokens = math.prod(call.argument("grid"))
    return mac(batch * tokens * dim * math.prod(module.sizes))


RULES: dict[type[nn.Module], Callable[[Call, Any], Counts]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.LayerNorm: layer_norm,
    LocalBranch: local_branch,
}


def rows(model: nn.Module, calls: list[Call]) -> tuple[list[tuple[str, str, Any, Counts]], list[str]]:
    """(name, kind, part, counts) of every layer that is counted, and the names of those that are unknown."""
    layers = {f.layer: f for f in find_layers(model) if not f.ours}
    parts = Parts(model)
    found: list[tuple[str, str, Any, Counts]] = []
    unknown: list[str] = []
    for call, latest in with_parts(calls):
        counts = _counts(call, layers.get(call.module), latest)
        kind = call.module.name if isinstance(call.module, Attention) else type(call.module).__name__
        if counts is not None:
            found.append((call.name, kind, parts.of(call.name), counts))
        elif call.module in layers or _works(call):
            unknown.append(f"{call.name or 'the model itself'} ({kind})")
    return found, list(dict.fromkeys(unknown))


def _counts(call: Call, layer: Found | None, latest: Mapping[str, Call]) -> Counts | None:
    """What a call costs by the rule of its module; None where there is no rule."""
    rule = RULES.get(type(call.module)) or next(
        (rule for cls, rule in RULES.items() if isinstance(call.module, cls)), None
    )
    if rule is not None:
        return rule(call, call.module)
    if isinstance(call.module, Attention):
        of_mechanism = mechanism_rule(call.module)
        return None if of_mechanism is None else of_mechanism(call.module, call.inputs[-2]) * call.inputs[0]
    seen = attending(call, layer, latest)
    if seen is None:
        return None
    own = mac(sum(math.prod(sizes) for sizes in seen.projections))
    return own + attention_to(seen.groups * seen.queries, seen.keys, seen.dim, seen.heads)


def _works(call: Call) -> bool:
    """Whether a module without a rule does anything that ought to be counted.

    Mechanisms do, and so do modules that multiply matrices or their own parameters, outside of submodules.
    Modules that look rows up do not.
    """
    if isinstance(call.module, nn.Embedding):
        return False
    is_leaf = not any(True for _ in call.module.children())
    has_own = any(True for _ in call.module.parameters(recurse=False))
    return isinstance(call.module, Attention) or bool(call.works) or (is_leaf and has_own)
