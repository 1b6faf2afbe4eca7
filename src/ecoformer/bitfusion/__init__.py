"""BitFusion as an analytic model: time and energy of matrix products on an array of split multipliers.

`simulate(FullyConnected(16, 32, 3136))` searches tiles and loop orders and returns the cost of the best one;
`simulate_model(model, (1, 3, 224, 224))` does so for every layer of a model.
"""

from __future__ import annotations

from .array import BitFusion, EnergyTable
from .model import ModelResult, ModelWork, attention_layer, model_work, simulate_model
from .ops import Convolution, FullyConnected, Op, Work
from .paper_table import printed_table, printed_work
from .simulation import PAPER_ARRAY, Result, Total, simulate, simulate_all

__all__ = [
    "PAPER_ARRAY",
    "BitFusion",
    "Convolution",
    "EnergyTable",
    "FullyConnected",
    "ModelResult",
    "ModelWork",
    "Op",
    "Result",
    "Total",
    "Work",
    "attention_layer",
    "model_work",
    "printed_table",
    "printed_work",
    "simulate",
    "simulate_all",
    "simulate_model",
]
