"""Options, parsing and printing that several commands share."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from ecoformer.attention.base import unknown_setting
from ecoformer.attention.registry import attention_class
from ecoformer.cli.sources import inputs_of, open_model
from ecoformer.conversion import convert

NATIVE = "native"
"""The name of a model as it is."""
INPUTS = ("resolution", "tokens")
"""Parameters of the input in `--sweep`; all others are arguments of the mechanism."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MODEL_HELP = "A name (timm, Hugging Face, `lra_text`), a checkpoint, or a folder of `save_pretrained`."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
BEST = "sharp_eco"
"""The mechanism to convert to, if none is named."""
Attention = Annotated[str, typer.Option(help="The mechanism; `ecoformer info` lists them.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="Pattern of layer names, such as `stages.1.*`, or `all`; repeatable."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An argument of the mechanism; repeatable."),
]
Resolution = Annotated[
    int | None, typer.Option(help="Height and width of the image; default: the model's own.", min=1)
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens of the text; default: the longest that it takes.", min=1)
]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="Load the trained weights of a model given by its name.")
]
Accounting = Annotated[
    Literal["paper", "exact"],
    typer.Option(help="`paper` counts what the paper counts, `exact` everything that is executed."),
]
Energy = Annotated[
    str,
    typer.Option(
        help="Energy of an operation: `45nm` or `7nm`, with memory `45nm-dram` or `7nm-hbm`, in other widths "
        "`int8-7nm`; or a JSON file."
    ),
]


def plain_console() -> Console:
    """A console that prints brackets in names as they are, and long lines in a pipe."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    return console


@contextmanager
def progress(as_json: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done."""
    with Console(stderr=True, markup=False, highlight=False, quiet=as_json).status("") as status:
        yield status.update


def say(text: object) -> None:
    """Print text, broken between words where the terminal ends."""
    plain_console().print(str(text))


def print_json(facts: Any) -> None:
    """Print facts as JSON."""
    typer.echo(json.dumps(facts, indent=2))


def show(facts: Any, text: object, as_json: bool) -> None:
    """Print facts as JSON, or text."""
    print_json(facts) if as_json else say(text)


def print_table(
    names: Iterable[str], rows: Iterable[dict[str, Any]], figures: Iterable[str], **about: Any
) -> None:
    """Print rows as a table: names on the left, figures aligned to the right and never cut or broken.

    `about` are arguments of the table, such as its `title`.
    """
    columns = [Column(name, overflow="fold") for name in names]
    columns += [Column(name, justify="right", no_wrap=True) for name in figures]
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), **about)
    for row in rows:
        table.add_row(*(str(row[str(column.header)]) for column in columns))
    plain_console().print(table)


def exclude(*options: tuple[str, Any]) -> None:
    """Refuse more than one of these options."""
    given = [name for name, value in options if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be combined")


def names_in(text: str, option: str) -> list[str]:
    """Names separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} takes names separated by commas, such as softmax,eco, got {text!r}")
    return names


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """The settings of several `KEY=VALUE`; a value is a Python literal or else a string."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set takes KEY=VALUE, such as bits=8, got {text!r}")
        found[key] = _value(value)
    return found


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """The name and the values of `KEY=VALUE,VALUE,...`."""
    key, _, values = text.partition("=")
    found = [_value(value.strip()) for value in values.split(",")]
    if not key.isidentifier() or "" in found:
        raise ValueError(f"--sweep takes KEY=VALUE,VALUE, such as resolution=224,384, got {text!r}")
    if key in INPUTS and not all(type(value) is int and value > 0 for value in found):
        raise ValueError(f"--sweep {key} takes positive integers, got {values!r}")
    return key, found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_settings(mechanisms: Iterable[str], keys: Iterable[str]) -> None:
    """Refuse a setting that none of these mechanisms has."""
    named = [attention_class(name) for name in mechanisms if name != NATIVE]
    for key in keys:
        if not any(key in cls.settings() for cls in named):
            problem = unknown_setting(key, named) if named else f"{key!r} needs a mechanism: name one"
            raise ValueError(f"--set: {problem}")


def counted_model(
    name: str,
    mechanism: str,
    settings: dict[str, Any] | None = None,
    *,
    batch: int = 1,
    resolution: int | None = None,
    tokens: int | None = None,
) -> tuple[nn.Module, Tensor]:
    """A model to be counted, converted unless `mechanism` is "native", and an input for it.

    Settings that the mechanism does not have are ignored.
    """
    model = open_model(name, resolution=resolution, tokens=tokens, shapes_only=True).model
    inputs = inputs_of(model, resolution, tokens)
    example = inputs(batch)
    if mechanism != NATIVE:
        known = attention_class(mechanism).settings()
        own = {key: value for key, value in (settings or {}).items() if key in known}
        convert(model, mechanism, example=example, **own)
    return model, example
