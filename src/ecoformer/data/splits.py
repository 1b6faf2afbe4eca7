"""A data set: a training and a test part, in memory or decoded on access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.data import Subset

from ecoformer.arguments import shape

if TYPE_CHECKING:
    from PIL import Image

Kind = Literal["images", "text", "pairs", "tokens"]

IGNORED = -100
"""Target of a token that has no target."""

_DIMENSIONS = {"images": 4, "text": 2, "pairs": 3, "tokens": 2}


@dataclass(frozen=True, eq=False)
class Arrays:
    """Samples in memory.

    Attributes:
        inputs: images (N, C, H, W) of uint8, token ids (N, L), or pairs of them (N, 2, L), in a small dtype.
        targets: classes (N,) of int64; or one for each token (N, L), where `IGNORED` is none.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"inputs {shape(self.inputs)} and targets {shape(self.targets)} must have the same length"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Samples by an index (B,) of any device, with the dtypes that are stored."""
        index = index.to(self.inputs.device)
        return self.inputs[index], self.targets[index]

    def to(self, device: str | torch.device) -> Arrays:
        """The same samples on a device."""
        return Arrays(self.inputs.to(device), self.targets.to(device))


class Pictures(Protocol):
    """Any map-style data set of Pillow's pictures and their classes, such as torchvision's."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[Image.Image, int]: ...


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set.

    Attributes:
        train: samples to learn from.
        test: samples to measure with.
        kind: what a sample is; "tokens" are texts with a class for some of their tokens.
        classes: number of classes of a sample, or of a token.
        vocabulary: number of token ids, padding included; 0 for images.
        length: tokens of a row; 0 for images.
        name: name of the data set.
        masked: share of bytes that `mask_bytes` hides in a batch of training samples, which are clean and
            have `IGNORED` targets until then; test samples are masked already.
    """

    train: Arrays | Pictures
    test: Arrays | Pictures
    kind: Kind
    classes: int
    vocabulary: int = 0
    length: int = 0
    name: str = ""
    masked: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _DIMENSIONS:
            raise ValueError(f"kind must be one of {', '.join(_DIMENSIONS)}, got {self.kind!r}")
        for part in (self.train, self.test):
            if isinstance(part, Arrays) and part.inputs.ndim != _DIMENSIONS[self.kind]:
                raise ValueError(
                    f"inputs of kind {self.kind!r} have {_DIMENSIONS[self.kind]} dimensions, "
                    f"got {shape(part.inputs)}"
                )


def balanced(labels: Tensor, limit: int) -> Tensor:
    """Sorted indices of `limit` samples, with equal shares of the classes as far as they have samples.

    The choice is fixed and spread over all samples.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    labels = torch.unique(labels.cpu(), return_inverse=True)[1]  # small numbers, however large the labels
    order = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turn = torch.arange(len(order)) - starts
    return order[turn.argsort(stable=True)][:limit].sort().values


def targets_of(part: Arrays | Pictures) -> Tensor | None:
    """Targets as far as they are known without decoding: of `Arrays` and torchvision's data sets."""
    found = getattr(part, "targets", None)
    return None if found is None else torch.as_tensor(found)


def limited(part: Arrays | Pictures, limit: int) -> Arrays | Pictures:
    """At most `limit` samples of a part, see `balanced`."""
    if len(part) <= limit:
        return part
    targets = targets_of(part)
    if targets is None or targets.ndim != 1:
        targets = torch.zeros(len(part), dtype=torch.int64)
    chosen = balanced(targets, limit)
    if isinstance(part, Arrays):
        return Arrays(*part.batch(chosen))
    source: Any = part
    return Subset(source, chosen.tolist())
