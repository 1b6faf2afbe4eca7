"""Optional packages, which `import ecoformer` does not import, and the extras that install them."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

EXTRAS = {
    "vision": ("timm", "torchvision", "PIL"),
    "text": ("transformers", "tokenizers"),
    "train": ("accelerate", "pydantic", "sklearn", "tensorboard", "yaml"),
    "figures": ("matplotlib",),
    "energy": ("zeus",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
}
"""Packages that an extra of ours installs."""

_declared: list[Any] = []
"""Declarations last as long as their library object."""


def import_library(name: str) -> Any:
    """Import a module of an optional package; one clear line says what is missing or broken."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing(error) from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise ImportError(
            f"{name} cannot be imported: torch {torch.__version__} and torchvision {version('torchvision')} "
            "are different builds; install both from the same index"
        ) from error


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with the extra to install, if one of ours has the package."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            hint = f"{package} is not installed: pip install 'ecoformer[{extra}]'"
            return ModuleNotFoundError(hint, name=package)
    return error


def import_timm() -> Any:
    """timm, with our models registered."""
    timm = import_library("timm")
    for family in ("pvt_v2", "twins"):
        importlib.import_module(f"ecoformer.models.{family}")
    return timm


def check_timm_name(name: str, problem: str) -> None:
    """Raise `problem`, with similar names, for a name that timm does not know."""
    timm = import_timm()
    if timm.is_model(name):
        return
    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() lists the names"
    raise ValueError(f"{problem}: {hint}")


def repair_torchvision() -> None:
    """Declare the operators that torchvision's import asks for, where its binary cannot be loaded.

    A torchvision built for CUDA cannot load its operators beside a CPU build of torch, and timm and
    transformers then cannot be imported. Only our commands and tests call this.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    for binary in Path(spec.origin).parent.glob("_C*"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(binary))  # type: ignore[no-untyped-call]
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
