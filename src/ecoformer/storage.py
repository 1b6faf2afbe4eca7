"""Checkpoint files: tensors and a JSON config in one safetensors file, replaced completely or not at all.

The config and a checksum of the file are text in the file's metadata, so any safetensors tool can read the
tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.files import replacing

FORMAT = 1
_CONFIG, _CHECKSUM = "ecoformer", "sha256"
_UNSEALED = b"0" * 64
"""Stands for the checksum while it is computed."""
_MISSING = object()
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What json.loads raises, and a lookup in JSON of another shape."""


class CheckpointError(ValueError):
    """A file is not a checkpoint, is damaged, or does not fit the model. The message is one line."""


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write tensors and config to a safetensors file, which appears complete or stays as it was.

    Args:
        path: the file; its folder must exist. A link is followed. A new file follows the umask, an existing
            one keeps its permissions.
        tensors: dense, on any device. Tied tensors (the same memory) are stored once and are tied again when
            read; other views of shared memory are stored as copies.
        config: what JSON can hold. Tuples become lists, keys become strings.

    Returns:
        `path`, as a Path.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}: create it first")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"{target} is a folder or a device: pass the path of a regular file")
    stored, aliases = _without_aliases(dict(tensors))
    envelope = {"format": FORMAT, "config": dict(config)} | ({"aliases": aliases} if aliases else {})
    metadata = {"format": "pt", _CONFIG: as_json(envelope), _CHECKSUM: _UNSEALED.decode()}
    with replacing(target) as temporary:
        try:
            save_file(stored, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {target}: {one_line(error)}") from error
        with open(temporary, "r+b") as file:
            _seal(file, sum(tensor.nbytes for tensor in stored.values()), str(target))
    return Path(path)


def as_json(config: Mapping[str, Any]) -> str:
    """A config as JSON text; what JSON cannot hold is an error."""
    try:
        return json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"the config cannot be stored ({one_line(error)}): it takes strings, finite numbers, booleans, "
            "None, lists and dicts"
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a file that `write` wrote; a file with a checksum is verified."""
    from safetensors.torch import load

    source = os.fspath(path)
    # One handle for everything: safetensors' load_file opens the path twice and, if the file is replaced in
    # between, splits the new file's bytes by the old file's header.
    with open_regular(source) as file:
        end = _end_of_header(file, source)
        file.seek(0)
        content = file.read()
    try:
        stored = load(content)
        metadata = json.loads(content[8:end]).get("__metadata__", {})
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes fail in more ways than safetensors has a class for
        raise CheckpointError(f"{source} is truncated or damaged: {one_line(error)}") from error
    config, aliases = _open_envelope(metadata, source)
    if _CHECKSUM in metadata:
        at = content.find(str(metadata[_CHECKSUM]).encode(), 0, end)
        if at < 0 or _digest(content, at) != metadata[_CHECKSUM]:
            raise CheckpointError(f"{source} is damaged: its checksum does not match; copy or save it again")
    if not stored.keys() >= set(aliases.values()) or stored.keys() & aliases.keys():
        raise CheckpointError(f"{source} is damaged: its tied names do not match its tensors")
    return stored | {alias: stored[name] for alias, name in aliases.items()}, config


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; opening a pipe would wait forever."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    if not regular:
        raise CheckpointError(f"{path} is a folder or a device: pass the path of a checkpoint file")
    return open(path, "rb")


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy tensors into a model that has exactly these names and shapes.

    Everything is checked before anything is copied: a model that does not fit stays as it was. Precision may
    differ, but not the kind of number. Only a module whose own loading code raises can be left half loaded.

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
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        what = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise CheckpointError(
            f"tensor {name!r} is {what}: only dense bool, int and float tensors with data can be stored"
        )


def _seal(file: BinaryIO, data_bytes: int, source: str) -> None:
    """Write the checksum into a new file, once the file is found to be complete."""
    end = _end_of_header(file, source)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if len(content) != end + data_bytes:
            raise OSError(f"{source} was not written completely: {len(content)} of {end + data_bytes} bytes")
        # In the config, which is text within this text, quotes are escaped: it cannot hold this.
        before = f'"{_CHECKSUM}":"'.encode()
        at = content.find(before + _UNSEALED, 0, end) + len(before)
        digest = _digest(content, at)
    file.seek(at)
    file.write(digest.encode())


def _digest(content: bytes | mmap.mmap, at: int) -> str:
    """SHA-256 of a file, with zeros where the checksum stands."""
    with memoryview(content) as view, view[:at] as before, view[at + len(_UNSEALED) :] as after:
        digest = hashlib.sha256(before)
        digest.update(_UNSEALED)
        digest.update(after)
    return digest.hexdigest()


def _end_of_header(file: BinaryIO, source: str) -> int:
    """Where a safetensors file's header ends, once it is known to be of reasonable length.

    Parsed JSON takes some 30 times its length, so a header may be long only where the tensors are large.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(9)
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < 9:
        raise CheckpointError(f"{source} is empty or truncated: copy or save it again")
    if start[8:] != b"{":
        hint = ""
        if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] <= b"\x05"):
            hint = (
                " but a PyTorch pickle: torch.load(..., weights_only=True) reads it, then "
                "ecoformer.load_official or load_state_dict takes the result"
            )
        raise CheckpointError(f"{source} is not a safetensors file{hint}")
    if end > size:
        raise CheckpointError(f"{source} is truncated or damaged: it ends within its header")
    if end > max(1 << 23, size // 8):
        raise CheckpointError(f"{source} is damaged: {end} of its {size} bytes are header")
    return end


def _open_envelope(metadata: Any, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config, and {name: stored name} of tied tensors."""
    if not isinstance(metadata, dict) or _CONFIG not in metadata:
        remedy = "load it into a model of your own with safetensors.torch.load_file"
        raise CheckpointError(f"{source} holds tensors but no ecoformer config: {remedy}")
    try:
        envelope = json.loads(metadata[_CONFIG])
        version = envelope["format"]
    except _MALFORMED as error:
        raise CheckpointError(f"the config in {source} is damaged: {one_line(error)}") from error
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            f"{source} has format {version}, newer than {FORMAT}: upgrade ecoformer to read it"
        )
    config, aliases = envelope.get("config"), envelope.get("aliases", {})
    sound = isinstance(config, dict) and isinstance(aliases, dict)
    if version != FORMAT or not sound or not all(isinstance(name, str) for name in aliases.values()):
        raise CheckpointError(f"the config in {source} is damaged: it does not have format {FORMAT}")
    return config, aliases


def _differences(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """How the tensors differ from those that the model's state names."""
    found: dict[str, list[str]] = {}
    for name in {**state, **tensors}:
        what, how = _misfit(name, state.get(name), tensors.get(name, _MISSING))
        if what:
            found.setdefault(what, []).append(f"{name!r}{how}")
    return [_listed(what, names) for what, names in found.items()]


def _misfit(name: str, ours: Tensor | None, theirs: Any) -> tuple[str, str]:
    """What is wrong with a tensor, and how; empty if nothing is."""
    if theirs is _MISSING or ours is None:
        return ("missing" if theirs is _MISSING else "unexpected"), ""
    if name.rpartition(".")[2] == "_extra_state":  # may have any size
        return "", ""
    if not isinstance(theirs, Tensor) or theirs.is_meta:
        return "without data", f" {type(theirs).__name__}"
    if theirs.shape != ours.shape:
        return "of another shape", f" {tuple(theirs.shape)} instead of {tuple(ours.shape)}"
    if _kind(theirs) != _kind(ours):
        return "of another kind of number", f" {theirs.dtype} instead of {ours.dtype}"
    return "", ""


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
