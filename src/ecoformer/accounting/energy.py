"""Energy tables: picojoules per operation, with their sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ecoformer.operations import KINDS, Counts


@dataclass(frozen=True)
class EnergyTable:
    """Picojoules for each kind of operation, and for each byte that is moved.

    `widths` has prices by width of the operands, such as "int8"; a width that is not in there pays `pj`.
    """

    name: str
    pj: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    widths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.pj if kind not in KINDS]
        if unknown:
            raise ValueError(f"energy table {self.name!r} has {unknown[0]!r}; known are {', '.join(KINDS)}")
        missing = [kind for kind in ("mul", "add") if kind not in self.pj]
        if missing:
            raise ValueError(f"energy table {self.name!r} lacks {missing[0]!r}")
        for kind, value in self.pj.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf"):
                raise ValueError(f"energy table {self.name!r}: {kind} must be a number >= 0, got {value!r}")

    def energy_pj(self, counts: Counts) -> float:
        """Energy of these operations, each at its width; kinds without a price are free."""
        operations = sum(
            self.widths.get(width, self.pj).get(kind, 0.0) * number
            for width, part in counts.widths.items()
            for kind, number in part.to_dict().items()
        )
        return float(operations + self.pj.get("bytes", 0.0) * counts.bytes)


@dataclass(frozen=True)
class Process:
    """What operations and memory take in one manufacturing process, in picojoules.

    Attributes:
        operations: a product and a sum by width of the operands.
        shift: a 32-bit shift.
        memory: moving one byte, by kind of memory.
    """

    operations: Mapping[str, tuple[float, float]]
    shift: float
    memory: Mapping[str, float]
    source: str


PROCESSES = {
    "45nm": Process(
        {"fp32": (3.7, 0.9), "fp16": (1.1, 0.4), "int32": (3.1, 0.1), "int8": (0.2, 0.03)},
        0.13,
        {"sram": 10 / 8, "dram": 1300 / 8},
        "Horowitz, Computing's energy problem, ISSCC 2014 (fp32 is the paper's table); 64 bits of an 8 KB "
        "SRAM at 10 pJ, of DRAM at 1300 pJ, the lower end of 1300 to 2600",
    ),
    "7nm": Process(
        {
            "fp32": (1.31, 0.38),
            "fp16": (0.34, 0.16),
            "bf16": (0.21, 0.11),
            "int32": (1.48, 0.03),
            "int8": (0.07, 0.007),
        },
        0.03,
        {"sram": 7.5 / 8, "hbm": 250 / 8, "dram": 1300 / 8},
        "Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i, ISCA 2021, table 2; a "
        "shift, which it leaves out, as an int32 sum; 64 bits of an 8 KB SRAM at 7.5 pJ, of HBM2 at 250 pJ, "
        "the lower end of 250 to 450, of DDR4 at 1300 pJ",
    ),
}
"""By name."""

_AT_MOST = {"int16": "int32", "bf16": "fp32"}
"""Widths without published figures take those of wider ones."""


def _tables() -> dict[str, EnergyTable]:
    """All tables by name."""
    found = {}
    for process_name, process in PROCESSES.items():
        for memory, byte in {"": None, **process.memory}.items():
            moved = {} if byte is None else {"bytes": byte}
            prices = {
                width: {"mul": mul, "add": add, "shift": process.shift} | moved
                for width, (mul, add) in process.operations.items()
            }
            name = "-".join(filter(None, (process_name, memory)))
            bounds = {width: wider for width, wider in _AT_MOST.items() if width not in prices}
            widths = prices | {width: prices[wider] for width, wider in bounds.items()}
            note = "".join(f"; {width} at most as {wider}" for width, wider in bounds.items())
            found[name] = EnergyTable(name, prices["fp32"], process.source + note, widths)
            for width, pj in prices.items():
                found[f"{width}-{name}"] = EnergyTable(f"{width}-{name}", pj, process.source)
    return found


def list_energy_tables() -> list[str]:
    """Names that `energy_table` knows: PROCESS and PROCESS-MEMORY, alone and after WIDTH-."""
    return list(_tables())


def energy_table(table: str | PathLike[str] | Mapping[str, Any] | EnergyTable) -> EnergyTable:
    """A table by name, from a mapping such as {"mul": 3.7, "add": 0.9}, or from a JSON file with one.

    A name is [WIDTH-]PROCESS[-MEMORY], such as "45nm" or "int8-7nm-dram". With a width, all operations take
    its prices; without one, each operation takes those of its own. Without memory, moving bytes is free.
    """
    if isinstance(table, EnergyTable):
        return table
    if isinstance(table, Mapping):
        return EnergyTable("custom", dict(table))
    named = _tables().get(str(table))
    if named is not None:
        return named
    path = Path(table)
    if not path.is_file():
        known = "; ".join(
            f"{'|'.join(process.operations)}-{name}[-{'|'.join(process.memory)}]"
            for name, process in PROCESSES.items()
        )
        raise ValueError(
            f"energy must be one of {known}; the same without width; or a JSON file, got {str(table)!r}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"energy table {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"energy table {path} must hold a JSON object, got {type(content).__name__}")
    return EnergyTable(path.stem, content)
