"""What happens when the packages that ecoformer works with are imported, before or after it.

- timm: our models are registered with it, so that `timm.create_model("ecoformer_pvt_v2_b0")` works after
  `import ecoformer`, while `import ecoformer` itself loads nothing but torch.
- torchvision: a wheel built for CUDA cannot load its operators beside a CPU build of torch, and its import
  then fails with "operator torchvision::nms does not exist", taking timm and transformers with it. Nothing
  here uses those operators, so declaring them is enough.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_DECLARED: list[torch.library.Library] = []
"""Declarations last as long as their library object."""


def declare_torchvision_operators() -> None:
    """Declare the operators that torchvision's Python code asks for, where its binary cannot be loaded."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _DECLARED:
        return
    for binary in Path(spec.origin).parent.glob("_C*"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(binary))  # type: ignore[no-untyped-call]
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)


def register_models() -> None:
    """Make our models known to timm; a timm that they cannot be built on stays usable."""
    try:
        for family in ("pvt_v2", "twins"):
            importlib.import_module(f"ecoformer.models.{family}")
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(f"ecoformer's models are not registered with timm: {error}", stacklevel=2)


_BEFORE: dict[str, Callable[[], None]] = {"torchvision": declare_torchvision_operators}
_AFTER: dict[str, Callable[[], None]] = {"timm": register_models}


class _Loader(importlib.abc.Loader):
    """A module's own loader, with something done before and after it runs."""

    def __init__(self, name: str, loader: importlib.abc.Loader) -> None:
        self.name, self.loader = name, loader

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.loader, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module is left with its own loader, as if nobody had stood between.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        _BEFORE.get(self.name, _nothing)()
        self.loader.exec_module(module)
        _AFTER.get(self.name, _nothing)()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the packages that are waited for where everybody else finds them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _BEFORE and fullname not in _AFTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (
            finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec")
        )
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(fullname, spec.loader)
        return spec


def _nothing() -> None:
    pass


def watch_imports() -> None:
    """Do for every neighbour what it needs: now if it is there already, else when it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, act in _AFTER.items():
        if sys.modules.get(name) is not None:
            act()
