"""Training: recipes, one loop on Accelerate, checkpoints that lose nothing."""

from ecoformer.training.processes import is_first_process
from ecoformer.training.recipe import Recipe, as_yaml, list_recipes, load_recipe
from ecoformer.training.run import evaluate, evaluate_path, train

__all__ = [
    "Recipe",
    "as_yaml",
    "evaluate",
    "evaluate_path",
    "is_first_process",
    "list_recipes",
    "load_recipe",
    "train",
]
