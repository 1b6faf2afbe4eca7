"""Data sets by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ecoformer.data.splits import Splits, limited

F = TypeVar("F", bound=Callable[..., Splits])

_REGISTRY: dict[str, tuple[Callable[..., Splits], str | None]] = {}


def register_dataset(name: str, *, layout: str | None = None) -> Callable[[F], F]:
    """Decorator: register a function that makes `Splits` from keyword options as data set `name`.

    Args:
        name: for `load`.
        layout: what the folder `root` must hold, for error messages. The function takes the folder as its
            first argument; without a layout it takes none.
    """

    def register(make: F) -> F:
        if name in _REGISTRY:
            raise ValueError(f"a data set named {name!r} is already registered")
        _REGISTRY[name] = (make, layout)
        return make

    return register


def list_datasets() -> list[str]:
    """Names that `load` takes."""
    return sorted(_REGISTRY)


def load(
    name: str, root: str | os.PathLike[str] | None = None, *, limit: int | None = None, **options: Any
) -> Splits:
    """A data set by name.

    Args:
        name: one of `list_datasets`.
        root: the folder that holds it, for data sets that are neither embedded nor generated.
        limit: most samples of each split: a fixed choice with balanced classes.
        options: of the data set.
    """
    if name not in _REGISTRY:
        raise ValueError(f"no data set is named {name!r}: there are {', '.join(list_datasets())}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    make, layout = _REGISTRY[name]
    known = inspect.signature(make).parameters
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"{name} has no option {', '.join(unknown)}: it takes {', '.join(known)}")
    splits = make(*_folder(name, layout, root), **options)
    if limit is not None:
        splits = replace(splits, train=limited(splits.train, limit), test=limited(splits.test, limit))
    return splits if splits.name else replace(splits, name=name)


def _folder(name: str, layout: str | None, root: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    if layout is None:
        if root is not None:
            raise ValueError(f"{name} needs no files: leave root={os.fspath(root)!r} out")
        return ()
    if root is None:
        raise ValueError(f"{name} needs root, a folder that holds {layout}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {folder}; it must hold {layout}")
    return (folder,)
