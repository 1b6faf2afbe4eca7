"""Checkpoint files: tensors and a config in one safetensors file, written as a whole or not at all.

The config is JSON text in the file's metadata, so that any safetensors tool can read the tensors. What the
config means is for others to say.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.files import replacing

__all__ = [
    "CheckpointError",
    "check_config",
    "check_fit",
    "load_into",
    "read",
    "read_config",
    "write",
]

FORMAT = 1
_KEY = "ecoformer"
_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES |= {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_DTYPES |= {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
# What reading JSON raises, and looking in it for what is not there.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class CheckpointError(ValueError):
    """A file is no checkpoint of ours, is damaged, or does not fit the model; the message is one line."""


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write tensors and config to a safetensors file, which appears complete or stays as it was.

    Args:
        path: the file; its folder must exist. A link is followed. A new file follows the umask, one that is
            replaced keeps its permissions.
        tensors: dense, on any device. Those that are one and the same memory are stored once and are one
            again when read; other views of shared memory are stored as copies.
        config: strings, finite numbers, booleans, None, and lists and dicts of them. Tuples become lists.

    Returns:
        `path`, as a Path.
    """
    target = Path(os.path.realpath(path))
    _check_target(target)
    envelope: dict[str, Any] = {"format": FORMAT, "config": _plain(dict(config), "config")}
    stored, aliases = _without_aliases(dict(tensors))
    if aliases:
        envelope["aliases"] = aliases
    _replace(target, stored, {"format": "pt", _KEY: json.dumps(envelope)})
    return Path(path)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise what `write` would raise of a config that JSON cannot hold."""
    _plain(dict(config), "config")


def read(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, on `device`, and its config."""
    path, device = os.fspath(path), torch.device(device)
    # One handle for all: safetensors' own load_file opens the path twice and, when the file is replaced in
    # between, cuts the new file's bytes by the old file's header.
    with _open(path) as file:
        config, aliases = _read_envelope(file, path)
        stored = _read_tensors(file, path)
    if not stored.keys() >= set(aliases.values()) or stored.keys() & aliases.keys():
        raise CheckpointError(f"{path} is damaged: its tied names do not match its tensors")
    tensors = {name: tensor.to(device) for name, tensor in stored.items()}
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}, config


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config of a checkpoint; its tensors are not read."""
    with _open(os.fspath(path)) as file:
        return _read_envelope(file, os.fspath(path))[0]


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy tensors into a model that has exactly these names and shapes.

    Everything is checked before anything is copied: a model that does not fit stays as it was. Precision may
    differ, but not the kind of number. Only a module whose own loading code raises can leave a part behind.

    Args:
        model: any module. Values are copied into its parameters and buffers, which stay where they are.
        tensors: what the model's `state_dict` names, hash functions and their `fitted` flag included.
        source: where the tensors come from, for error messages.
    """
    check_fit(model, tensors, source=source)
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values() if isinstance(tensor, Tensor)):
        raise CheckpointError(
            f"{type(model).__name__} is on the meta device, which holds no numbers: move it with "
            "to_empty(device=...) before loading"
        )
    # Updating the model's own dict keeps the modules' version numbers, which a plain dict would lack.
    state.update(tensors)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        refusal = f"{type(model).__name__} refused {source} and may hold a part of it"
        raise CheckpointError(f"{refusal}: {one_line(error)}") from error


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise what `load_into` would raise, and copy nothing; `model` may be on the meta device."""
    state = model.state_dict()
    problems = _differences(state, tensors) or _torn_ties(state, tensors)
    if problems:
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(problems)}")


def _check_target(target: Path) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}: create it first")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"{target} is a folder or a device: name an ordinary file")


def _plain(value: Any, where: str) -> Any:
    """The value as JSON gives it back; JSON itself would turn keys into strings and write NaN unasked."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON cannot hold: use None or a string")
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}: keys must be strings")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}: a config holds strings, numbers, booleans, None, lists, dicts"
    )


def _without_aliases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors as safetensors takes them, and {name: first name} of those that are the same memory."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
        original = first.setdefault(_identity(name, tensor), name)
        if original != name:
            aliases[name] = original
            continue
        ready = tensor.detach().cpu().resolve_neg().contiguous()
        if ready.untyped_storage().data_ptr() in storages:
            ready = ready.clone()
        storages.add(ready.untyped_storage().data_ptr())
        stored[name] = ready
    return stored, aliases


def _identity(name: str, tensor: Any) -> Hashable:
    """Equal for tensors that are the same numbers in the same memory; empty ones all lie at address 0."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return name
    # Without data there is no address, but there is still a storage.
    address = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    place = (tensor.device, address, tensor.storage_offset(), tensor.dtype, tensor.is_neg())
    return (*place, tuple(tensor.shape), tensor.stride())


def _check_storable(name: str, tensor: Tensor) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(f"tensors must map strings to tensors, got {name!r}: {type(tensor).__name__}")
    if name == "__metadata__" or name != name.encode(errors="ignore").decode():
        raise CheckpointError(f"a tensor cannot be named {name!r} in a safetensors file: rename it")
    if tensor.is_meta:
        raise CheckpointError(f"tensor {name!r} is on the meta device: it has no numbers to store")
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        what = f"{tensor.layout} of {tensor.dtype}"
        raise CheckpointError(f"tensor {name!r} is {what}: only dense bool, int and float can be stored")


def _replace(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside the target, and take its place only when everything is on the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(target) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {target}: {one_line(error)}") from error
        with open(temporary, "rb") as file:
            _read_envelope(file, str(target))  # a file cut short must not replace a good one


def _open(path: str) -> BinaryIO:
    try:
        ordinary = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    if not ordinary:  # opening a pipe would wait for ever
        raise CheckpointError(f"{path} is a folder or a device: name a checkpoint file")
    return open(path, "rb")


def _read_envelope(file: BinaryIO, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config, and {name: stored name} of tied tensors."""
    text = _read_header(file, path).get("__metadata__", {}).get(_KEY)
    if text is None:
        remedy = "load it into a model of your own with safetensors.torch.load_file"
        raise CheckpointError(f"{path} holds tensors but no ecoformer config: {remedy}")
    try:
        envelope = json.loads(text)
        version = envelope["format"]
    except _MALFORMED as error:
        raise CheckpointError(f"the config in {path} is damaged: {one_line(error)}") from error
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, newer than {FORMAT}: upgrade ecoformer to read it"
        )
    config, aliases = envelope.get("config"), envelope.get("aliases", {})
    sound = isinstance(config, dict) and isinstance(aliases, dict)
    if version != FORMAT or not sound or not all(isinstance(name, str) for name in aliases.values()):
        raise CheckpointError(f"the config in {path} is damaged: it is not as format {FORMAT} has it")
    return config, aliases


def _read_header(file: BinaryIO, path: str) -> dict[str, Any]:
    """The JSON at a safetensors file's start, once the file is as long as it says."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(9)
    if not start:
        raise CheckpointError(f"{path} is empty: write or copy it again")
    length = int.from_bytes(start[:8], "little")
    if len(start) == 9 and not (start[8:] == b"{" and 2 <= length <= _MAX_HEADER):
        raise CheckpointError(_not_safetensors(path, start))
    if len(start) < 9 or size < 8 + length:
        raise CheckpointError(f"{path} is truncated, it ends after {size} bytes: write or copy it again")
    try:
        header: dict[str, Any] = json.loads((b"{" + file.read(length - 1)).decode())
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
        short, exact = size < wanted, size == wanted
        if any(not isinstance(value, str) for value in header.get("__metadata__", {}).values()):
            raise TypeError("metadata must be text")
    except _MALFORMED as error:
        raise CheckpointError(f"{path} is damaged, its header cannot be read: {one_line(error)}") from error
    if not exact:
        what = "truncated" if short else "damaged"
        raise CheckpointError(f"{path} is {what}, it has {size} of {wanted} bytes: write or copy it again")
    return header


def _read_tensors(file: BinaryIO, path: str) -> dict[str, Tensor]:
    from safetensors.torch import load

    file.seek(0)
    content = file.read()
    try:
        return load(content)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes fail in more ways than safetensors has a class for
        raise CheckpointError(f"{path} is damaged: {one_line(error)}") from error


def _not_safetensors(path: str, start: bytes) -> str:
    # Asked only of files that cannot be safetensors: a header of 640 bytes starts like a pickle, too.
    if start.startswith(b"PK\x03\x04") or (start[0] == 0x80 and start[1] <= 5):
        return (
            f"{path} is a PyTorch pickle, not safetensors: torch.load(..., weights_only=True) reads it, then "
            "ecoformer.load_official or load_state_dict takes the result"
        )
    return f"{path} is not a safetensors file"


def _differences(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """In which ways the tensors are not those that the model's state names."""
    found = {
        "missing": [repr(name) for name in state if name not in tensors],
        "unexpected": [repr(name) for name in tensors if name not in state],
    }
    for name, ours in state.items():
        if name in tensors and name.rpartition(".")[2] != "_extra_state":  # that may have any size
            for what, how in _misfit(tensors[name], ours).items():
                found.setdefault(what, []).append(f"{name!r}{how}")
    return [_listed(what, names) for what, names in found.items() if names]


def _misfit(theirs: Any, ours: Tensor) -> dict[str, str]:
    """{what is wrong: how}, or nothing."""
    if not isinstance(theirs, Tensor):
        return {"not a tensor": f" {type(theirs).__name__}"}
    if theirs.is_meta:
        return {"on the meta device": ""}
    if theirs.shape != ours.shape:
        return {"of another shape": f" {tuple(theirs.shape)} instead of {tuple(ours.shape)}"}
    if _kind(theirs) != _kind(ours):
        return {"of another kind of number": f" {theirs.dtype} instead of {ours.dtype}"}
    return {}


def _torn_ties(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names that are one tensor in the model and would overwrite each other with different numbers."""
    first: dict[Hashable, str] = {}
    torn = []
    for name, ours in state.items():
        other = first.setdefault(_identity(name, ours), name)
        if tensors[other] is not tensors[name] and not _same_bits(tensors[other], tensors[name]):
            torn.append(f"{other!r} and {name!r}")
    return [_listed("tied in the model but not here", torn)] if torn else []


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal`, true for NaN beside the same NaN."""
    # A single number counts as contiguous whatever its stride, but only a copy of stride 1 shows its bytes.
    copies = [x.detach().cpu().clone(memory_format=torch.contiguous_format) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in copies))


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.dtype == torch.bool, tensor.is_floating_point(), tensor.is_complex()


def _listed(what: str, names: list[str]) -> str:
    return f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
