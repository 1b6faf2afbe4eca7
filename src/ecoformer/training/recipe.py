"""Recipes: small YAML files that describe a training run. Every key is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from ecoformer.arguments import one_line
from ecoformer.checkpoints.describe import leads_elsewhere

RECIPES = resources.files("ecoformer.training") / "recipes"
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Part of a recipe: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    """The data set, as `ecoformer.data.load` takes it."""

    name: str
    root: str | None = None
    options: dict[str, Any] = {}
    workers: Count = 4
    """Processes that decode image files; data in memory need none."""


class Model(Section):
    """A timm model, or `text` for the encoder that fits the data."""

    name: str
    options: dict[str, Any] = {}

    @field_validator("options")
    @classmethod
    def _stay_here(cls, options: dict[str, Any]) -> dict[str, Any]:
        if leads_elsewhere(options):
            raise ValueError("names files or code, which are not opened: start from a checkpoint with start")
        return options


class Attention(Section):
    """The attention mechanism; `native` keeps the model's own attention."""

    name: str = "eco"
    options: dict[str, Any] = {}
    layers: str | list[str] | None = None


class Optimiser(Section):
    """Arguments of timm's `create_optimizer_v2`; biases and norms have no weight decay."""

    name: str = "adamw"
    lr: AboveZero
    weight_decay: AtLeastZero = 0.05
    eps: AboveZero = 1e-8
    clip: AtLeastZero = 0.0
    """Largest gradient norm; 0 for no limit."""


class Schedule(Section):
    """Length and learning rate schedule; exactly one of `epochs` and `steps`."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    epochs: Positive | None = None
    steps: Positive | None = None
    warmup: AtLeastZero = 0.0
    """In epochs if `epochs` is given, else in steps."""
    warmup_lr: AtLeastZero = 0.0
    floor: AtLeastZero = 0.0
    """Lowest learning rate."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Augment(Section):
    """Image augmentation; text ignores it."""

    size: Positive = 224
    pad: Count = 0
    """Random crops after padding by so many pixels; for images in memory."""
    flip: bool = False
    erase: Share = 0.0
    mixup: AtLeastZero = 0.0
    cutmix: AtLeastZero = 0.0
    auto: str = ""
    """timm's policy, such as rand-m9-mstd0.5-inc1; for image files."""
    jitter: AtLeastZero = 0.0
    crop_share: Share = 0.875
    """Share of a test image that the center crop keeps; for image files."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


class Hashing(Section):
    """How hash functions are fitted during training."""

    samples: Positive = 64
    refit_every: Count = 30
    """Epochs between fits, the paper's tau; 0 fits once, before the first step."""


class Teacher(Section):
    """A trained model to distill from."""

    checkpoint: str
    weight: Share = 0.5
    temperature: AboveZero = 1.0
    transfer: Count = 0
    """Steps of attention transfer before the first epoch, for a model converted from the teacher."""


class Recipe(Section):
    """A complete training run."""

    about: str
    data: Data
    model: Model
    attention: Attention = Attention()
    optimiser: Optimiser
    schedule: Schedule
    augment: Augment = Augment()
    hashing: Hashing = Hashing()
    teacher: Teacher | None = None
    start: str | None = None
    """Checkpoint to start from; converted if its mechanism differs."""
    batch: Positive
    """Samples per step, over all processes."""
    eval_batch: Positive | None = None
    accumulate: Positive = 1
    smoothing: Share = 0.0
    mode: Literal["train", "eval"] = "train"
    """`eval` turns dropout and stochastic depth off, as the released code does for fine-tuning."""
    ema: Share = 0.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    seed: Count = 0
    evaluate_every: Positive = 1
    """Epochs."""
    save_every: Positive = 500
    """Steps between checkpoints; every evaluation writes one too."""
    keep: Positive = 2
    """Number of checkpoints to keep."""
    log_every: Positive = 50
    tensorboard: bool = False


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.name[:-5] for file in RECIPES.iterdir() if file.name.endswith(".yaml"))


def load_recipe(source: str | Path, changes: Iterable[str] = ()) -> Recipe:
    """Load a recipe by name or file, with changes such as `optimiser.lr=1e-3`.

    A change of `attention.name` drops the recipe's `attention.options`; set those after it.
    """
    values = _read(source)
    for change in changes:
        _apply(values, change)
    return check_recipe(values, str(source))


def as_yaml(recipe: Recipe) -> str:
    """All values of a recipe, as a file that `load_recipe` reads."""
    return str(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The old and the new value where two recipes differ, by dotted name."""
    then, now = (_flat(recipe.model_dump(mode="json")) for recipe in (old, new))
    both = {name: (then.get(name), now.get(name)) for name in sorted({*then, *now})}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def check_recipe(values: Mapping[str, Any], source: str) -> Recipe:
    """Validate values as a recipe; all problems are reported in one line."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"recipe {source}: {'; '.join(map(_problem, error.errors()))}") from None


def _problem(found: Any) -> str:
    where, message = ".".join(map(str, found["loc"])), found["msg"].removeprefix("Value error, ")
    message = {"extra_forbidden": "is not a key of a recipe, see --show"}.get(found["type"], message)
    return f"{where} {message}".strip()


def _read(source: str | Path) -> dict[str, Any]:
    path: Any = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        if source not in list_recipes():
            raise ValueError(
                f"no recipe is called {source!r}: there are {', '.join(list_recipes())}, or name a .yaml file"
            )
        path = RECIPES / f"{source}.yaml"
    elif not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {source}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {source} is not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {source} must hold keys and values, got {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], change: str) -> None:
    key, sign, text = change.partition("=")
    if not sign or not all(key.split(".")):
        raise ValueError(f"--set takes key=value, such as optimiser.lr=1e-3, got {change!r}")
    *sections, last = key.split(".")
    target: Any = values
    for name in sections:
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            raise ValueError(f"--set {change}: {name} has no keys of its own")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"--set {key}: cannot read the value {text!r}") from None
    # YAML reads 1e-3 as a string.
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    if sections == ["schedule"] and last in ("epochs", "steps"):
        target.pop("steps" if last == "epochs" else "epochs", None)
    if sections == ["attention"] and last == "name" and value != target.get("name", "eco"):
        target.pop("options", None)  # they belong to the other mechanism
    target[last] = value
