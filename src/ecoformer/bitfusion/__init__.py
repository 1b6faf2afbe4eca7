"""BitFusion as an analytic model: time and energy of matrix products on an array of split multipliers.

`simulate(Product(16, 32, 3136))` searches tiles and loop orders and returns the cost of the best one;
`simulate_model(model, (1, 3, 224, 224))` does so for every layer of a model.
"""

from .array import BitFusion, EnergyTable
from .model import ModelResult, simulate_model
from .paper_table import printed_table
from .simulation import PAPER_ARRAY, Total, simulate, simulate_all

__all__ = [
    "PAPER_ARRAY",
    "BitFusion",
    "EnergyTable",
    "ModelResult",
    "Total",
    "printed_table",
    "simulate",
    "simulate_all",
    "simulate_model",
]
