"""Recipes: small YAML files that say what to train, on what and how; every key is checked."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from ecoformer.arguments import one_line

MAX_LENGTH, MAX_DEPTH = 100_000, 20
MASKED_DATA = ("masked_bytes", "masked_sample")
"""Data sets whose test bytes are hidden by `mask_rate`, as those of training are."""
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Part of a recipe: unknown keys are refused, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    """What is learned from."""

    name: str
    root: str | None = None
    options: dict[str, Any] = {}
    workers: Count = 4
    """Processes that decode pictures; data that fit in memory need none."""


class Model(Section):
    """A timm model's name, or `text` for the encoder that suits the data."""

    name: str
    options: dict[str, Any] = {}


class Attention(Section):
    """The mechanism; `native` leaves the model's own attention as it is."""

    name: str = "eco"
    options: dict[str, Any] = {}
    layers: str | list[str] | None = None


class Optimiser(Section):
    """As timm's `create_optimizer_v2` takes it; biases and norms do not decay."""

    name: str = "adamw"
    lr: AboveZero
    weight_decay: AtLeastZero = 0.05
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: AboveZero = 1e-8
    clip: AtLeastZero = 0.0
    """Largest norm of the gradient; 0 for no limit."""


class Schedule(Section):
    """How long, and how the learning rate moves; exactly one of `epochs` and `steps`."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    epochs: Positive | None = None
    steps: Positive | None = None
    warmup: AtLeastZero = 0.0
    """In epochs where `epochs` is given, else in steps."""
    warmup_lr: AtLeastZero = 0.0
    floor: AtLeastZero = 0.0
    """Lowest learning rate."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Augment(Section):
    """How pictures are changed; of no meaning to text."""

    size: Positive = 224
    pad: Count = 0
    """Random crops out of the picture padded by so many pixels, for data in memory."""
    flip: bool = False
    erase: Share = 0.0
    mixup: AtLeastZero = 0.0
    cutmix: AtLeastZero = 0.0
    auto: str = ""
    """timm's policy, such as rand-m9-mstd0.5-inc1; for pictures in files."""
    jitter: AtLeastZero = 0.0
    crop_share: Share = 0.875
    """Share of a test picture that the crop keeps; for pictures in files."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


class Hashing(Section):
    """How hash functions are learned while the model is."""

    samples: Positive = 64
    refit_every: Count = 30
    """Epochs between fits, the paper's tau; 0 fits once, before the first step."""


class Teacher(Section):
    """A trained model whose outputs are learned along with the labels."""

    checkpoint: str
    weight: Share = 0.5
    temperature: AboveZero = 1.0


class Recipe(Section):
    """One training run, complete."""

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
    """Checkpoint to start from; converted if its mechanism is another one."""
    batch: Positive
    """Samples of a step, over all processes."""
    eval_batch: Positive | None = None
    accumulate: Positive = 1
    split_tokens: Positive = 1
    """Processes that share a sample, each with a stretch of its tokens."""
    smoothing: Share = 0.0
    mask_rate: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the bytes that are hidden in training and testing, for data sets of masked bytes."""
    mode: Literal["train", "eval"] = "train"
    """`eval` keeps dropout and stochastic depth off, as the released code does when it fine-tunes."""
    ema: Share = 0.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    seed: Count = 0
    evaluate_every: Positive = 1
    """Epochs."""
    save_every: Positive = 500
    """Steps between checkpoints; one is written after every evaluation too."""
    keep: Positive = 2
    """Checkpoints that stay."""
    log_every: Positive = 50
    tensorboard: bool = False

    @model_validator(mode="before")
    @classmethod
    def _one_mask_rate(cls, values: Any) -> Any:
        """Take an older recipe's `data.options.rate`, of test data alone, as `mask_rate`."""
        data: Any = values.get("data") if isinstance(values, dict) else None
        options = data.get("options") if isinstance(data, dict) and data.get("name") in MASKED_DATA else None
        if not isinstance(options, dict) or "rate" not in options:
            return values
        rate = options["rate"]
        if values.get("mask_rate", rate) != rate:
            raise ValueError(
                f"mask_rate={values['mask_rate']} and data.options.rate={rate} are one setting: leave "
                "data.options.rate out"
            )
        rest = {name: value for name, value in options.items() if name != "rate"}
        return {**values, "mask_rate": rate, "data": {**data, "options": rest}}


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("ecoformer.training") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def load_recipe(source: str, changes: Iterable[str] = ()) -> Recipe:
    """A recipe by name or file, with changes such as `optimiser.lr=1e-3`.

    Another `attention.name` forgets the recipe's `attention.options`; set those after it.
    """
    values = _read(source)
    for change in changes:
        _apply(values, change)
    return checked(values, source)


def changed(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """A recipe with changes such as `data.root=/data/cifar`."""
    values = recipe.model_dump(mode="json")
    for change in changes:
        _apply(values, change)
    return checked(values, "with changes")


def as_yaml(recipe: Recipe) -> str:
    """All values of a recipe, as a file that `load_recipe` reads."""
    return str(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))


def checked(values: Mapping[str, Any], source: str) -> Recipe:
    """Values as a recipe, or one line that says what is wrong with them."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"recipe {source}: {'; '.join(map(_problem, error.errors()))}") from None


def _problem(found: Any) -> str:
    where = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        section = Recipe.model_fields if len(found["loc"]) == 1 else _fields(found["loc"][0])
        close = difflib.get_close_matches(str(found["loc"][-1]), section, n=1)
        hint = f", did you mean {close[0]}?" if close else f" (there are {', '.join(section)})"
        return f"no such key: {where}{hint}"
    if found["type"] == "missing":
        return f"{where} is missing"
    message = found["msg"].removeprefix("Value error, ")
    given = found["input"]
    plain = not isinstance(given, (dict, BaseModel))
    where += ": " if where else ""
    return f"{where}{message[0].lower()}{message[1:]}" + (f", got {given!r}" if plain else "")


def _fields(section: Any) -> list[str]:
    sections: dict[str, type[Section]] = {
        "data": Data,
        "model": Model,
        "attention": Attention,
        "optimiser": Optimiser,
    }
    sections |= {"schedule": Schedule, "augment": Augment, "hashing": Hashing, "teacher": Teacher}
    return list(sections[str(section)].model_fields) if section in sections else []


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no recipe file {source}")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_LENGTH + 1)
    elif source in list_recipes():
        text = (resources.files("ecoformer.training") / "recipes" / f"{source}.yaml").read_text("utf-8")
    else:
        names = ", ".join(list_recipes())
        raise ValueError(f"no recipe is called {source!r}: there are {names}, or name a .yaml file")
    try:
        values = _parse(text)
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {source} is not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {source} must hold keys and values, got {type(values).__name__}")
    return values


def _parse(text: str) -> Any:
    """Small, shallow YAML without aliases, a few lines of which can stand for billions of values."""
    if len(text) > MAX_LENGTH:
        raise yaml.YAMLError(f"longer than {MAX_LENGTH} characters")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported, write the values out")
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
    return yaml.safe_load(text)


def _apply(values: dict[str, Any], change: str) -> None:
    key, sign, text = change.partition("=")
    if not sign or not all(key.split(".")):
        raise ValueError(f"--set takes key=value, such as optimiser.lr=1e-3, got {change!r}")
    *sections, last = key.split(".")
    place = values
    for name in sections:
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise ValueError(f"--set {change}: {name} has no keys of its own")
    try:
        value = _parse(text)
    except yaml.YAMLError:
        raise ValueError(f"--set {key}: cannot read the value {text!r}") from None
    # YAML takes 1e-3 for a word.
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    if sections == ["schedule"] and last in ("epochs", "steps"):
        place.pop("steps" if last == "epochs" else "epochs", None)
    if sections == ["attention"] and last == "name" and value != place.get("name", "eco"):
        place.pop("options", None)  # they are the other mechanism's
    place[last] = value
