"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Replaced:
    """A layer that has a new mechanism."""

    name: str
    was: str
    dim: int
    num_heads: int
    left_behind: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """A layer that stayed as it was."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True)
class Conversion:
    """What `convert` replaced, what it left and why, and what is still to be done."""

    model: str
    mechanism: str
    config: dict[str, Any]
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "mechanism": self.mechanism,
            "config": dict(self.config),
            "replaced": [vars(layer) | {"left_behind": list(layer.left_behind)} for layer in self.replaced],
            "left": [dict(vars(layer)) for layer in self.left],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.config.items())
        total = len(self.replaced) + len(self.left)
        to = f"{self.mechanism} ({settings})" if settings else self.mechanism
        lines = [f"{self.model}: {len(self.replaced)} of {total} attention layers are {to} now"]
        width = max(
            len(name)
            for name in [layer.name for layer in self.replaced] + [layer.name for layer in self.left]
        )
        for done in self.replaced:
            heads = "1 head" if done.num_heads == 1 else f"{done.num_heads} heads"
            behind = f"; left behind: {', '.join(done.left_behind)}" if done.left_behind else ""
            lines.append(f"  {done.name:<{width}}  was {done.was}, {done.dim} channels, {heads}{behind}")
        if self.left:
            lines.append("left as they were")
        lines += [f"  {kept.name:<{width}}  {kept.kind}: {kept.why}" for kept in self.left]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
