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
    """Picojoules for each kind of operation, and for each byte that is moved."""

    name: str
    pj: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

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
        """Energy of these operations; kinds without a price are free."""
        return float(sum(self.pj.get(kind, 0.0) * number for kind, number in counts.to_dict().items()))


_FP32 = {"mul": 3.7, "add": 0.9, "shift": 0.13}
_SOURCE = "Horowitz, Computing's energy problem, ISSCC 2014, 45 nm: "
_AS_FP32 = f"{_SOURCE}as fp32-45nm, and "
_TABLES = {
    table.name: table
    for table in (
        EnergyTable("fp32-45nm", _FP32, f"{_SOURCE}fp32, and a 32-bit shift; the table of the paper"),
        EnergyTable(
            "fp32-45nm-sram", _FP32 | {"bytes": 1.25}, f"{_AS_FP32}10 pJ for 64 bits of an 8 KB SRAM"
        ),
        EnergyTable(
            "fp32-45nm-dram",
            _FP32 | {"bytes": 162.5},
            f"{_AS_FP32}1300 pJ, the lower end of 1300 to 2600, for 64 bits of DRAM",
        ),
        EnergyTable("fp16-45nm", {"mul": 1.1, "add": 0.4, "shift": 0.13}, f"{_SOURCE}fp16"),
        EnergyTable("int8-45nm", {"mul": 0.2, "add": 0.03, "shift": 0.13}, f"{_SOURCE}int8"),
    )
}


def list_energy_tables() -> list[str]:
    """Names that `energy_table` knows."""
    return sorted(_TABLES)


def energy_table(table: str | PathLike[str] | Mapping[str, Any] | EnergyTable) -> EnergyTable:
    """A table by name, from a mapping such as {"mul": 3.7, "add": 0.9}, or from a JSON file with one."""
    if isinstance(table, EnergyTable):
        return table
    if isinstance(table, Mapping):
        return EnergyTable("custom", dict(table))
    if isinstance(table, str) and table in _TABLES:
        return _TABLES[table]
    path = Path(table)
    if not path.is_file():
        known = ", ".join(list_energy_tables())
        raise ValueError(f"energy must be one of {known} or a JSON file, got {str(table)!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"energy table {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"energy table {path} must hold a JSON object, got {type(content).__name__}")
    return EnergyTable(path.stem, content)
