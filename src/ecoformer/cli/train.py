"""`ecoformer train` and `ecoformer eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ecoformer.cli.common import AsJson, print_json, print_table, show

Change = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a value, such as `optimiser.lr=1e-3`; can be repeated."),
]
Device = Annotated[str | None, typer.Option(help="`cpu` or `cuda`; default: a GPU if there is one.")]


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Name or YAML file of a recipe; default: list them.")
    ] = None,
    change: Change = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    device: Device = None,
    show_recipe: Annotated[
        bool, typer.Option("--show", help="Print the recipe with all its keys, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with a recipe.

    Example: `ecoformer train digits --set attention.name=softmax --out runs/softmax`

    Several processes: `torchrun --nproc-per-node 2 -m ecoformer train digits`
    """
    from ecoformer import training

    if recipe is None:
        rows = (
            {"recipe": name, "about": training.load_recipe(name).about} for name in training.list_recipes()
        )
        print_table(["recipe", "about"], rows, [])
        return
    chosen = training.load_recipe(recipe, change or [])
    if show_recipe:
        typer.echo(training.as_yaml(chosen), nl=False)
        return
    folder = out or Path("runs") / Path(recipe).stem
    result = training.train(chosen, folder, resume=resume, device=device, show=True)
    if not training.is_first_process():
        return
    if as_json:
        print_json(result)
        return
    paper = result["cost"]["paper"]
    typer.echo(f"accuracy {result['accuracy']:.2%} (best {result['best_accuracy']:.2%})")
    typer.echo(
        f"per sample: {paper['mul'] / 1e6:,.1f} M multiplications, {paper['add'] / 1e6:,.1f} M additions, "
        f"{paper['energy_pj'] / 1e9:.3g} mJ by the paper's accounting"
    )
    typer.echo(f"model: {folder / 'model.safetensors'}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint with --recipe.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe whose test data to use.")] = None,
    change: Change = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained model on test data.

    Example: `ecoformer eval runs/digits`
    """
    from ecoformer import training

    measured = training.evaluate_path(run, recipe, change or [], device=device)
    show(measured, f"accuracy {measured['accuracy']:.2%}, loss {measured['loss']:.4f}", as_json)
