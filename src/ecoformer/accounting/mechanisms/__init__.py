"""Closed formulas: what one forward pass of a mechanism executes, from its sizes alone.

A formula is of the whole layer (projections included) in eval mode, in fp32, without mask and causal order.
It follows the eager implementation, copies included, and counts by the conventions of
`ecoformer.accounting.conventions`; tests hold it to what PyTorch executes, number by number.

Letters: B samples, H heads, N tokens, C channels of a head, T = B H N rows of all heads.
"""

from ecoformer.accounting.mechanisms import combiner, eco, linformer, performer, reformer, softmax
from ecoformer.accounting.mechanisms.leaves import leaf_formula
from ecoformer.accounting.mechanisms.registry import formula, list_formulas, register_formula

__all__ = [
    "combiner",
    "eco",
    "formula",
    "leaf_formula",
    "linformer",
    "list_formulas",
    "performer",
    "reformer",
    "register_formula",
    "softmax",
]
