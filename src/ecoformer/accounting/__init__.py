"""What a model costs: operations and energy, layer by layer."""

from ecoformer.accounting.energy import EnergyTable, energy_table, list_energy_tables
from ecoformer.accounting.ledger import Ledger, cost
from ecoformer.accounting.planning import Plan, plan
from ecoformer.operations import Counts

__all__ = [
    "Counts",
    "EnergyTable",
    "Ledger",
    "Plan",
    "cost",
    "energy_table",
    "list_energy_tables",
    "plan",
]
