"""Checkpoint files: tensors and a JSON config in one safetensors file, replaced completely or not at all.

The config and a checksum are text in the file's metadata, so any safetensors tool can read the tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.files import replacing

FORMAT = 1
_CONFIG, _CHECKSUM = "ecoformer", "checksum"


class CheckpointError(ValueError):
    """A file is not a checkpoint, is damaged, or does not fit the model. The message is one line."""


@contextlib.contextmanager
def blaming(what: str, *passing: type[Exception]) -> Iterator[None]:
    """Whatever a library raises for a user's file, as a CheckpointError that begins with `what`.

    An ImportError and errors of the types `passing` stay as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (ImportError, *passing)):
            raise
        raise CheckpointError(f"{what}: {one_line(error)}") from error


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write tensors and config to a safetensors file, which appears complete or stays as it was.

    Args:
        path: the file; its folder must exist. A link is replaced, not followed.
        tensors: dense, on any device. Tied tensors (the same memory) are stored once and are tied again when
            read; other views of shared memory are stored as copies.
        config: what JSON can hold. Tuples become lists, keys become strings.

    Returns:
        `path`, as a Path.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    stored, aliases = _without_aliases(dict(tensors))
    text = as_json({"format": FORMAT, "config": dict(config), "aliases": aliases})
    metadata = {"format": "pt", _CONFIG: text, _CHECKSUM: _checksum(text, stored)}
    with replacing(path) as temporary:
        try:
            save_file(stored, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"could not write {path}: {one_line(error)}") from error
    return path


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
    with blaming(f"{source} is truncated or damaged", MemoryError):
        stored = load(content)
        metadata = json.loads(content[8:end]).get("__metadata__", {})
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_CONFIG), str):
        remedy = "load it into a model of your own with safetensors.torch.load_file"
        raise CheckpointError(f"{source} holds tensors but no ecoformer config: {remedy}")
    config, aliases = _open_envelope(metadata[_CONFIG], source)
    if metadata.get(_CHECKSUM) not in (None, _checksum(metadata[_CONFIG], stored)):
        raise CheckpointError(f"{source} is damaged: its checksum does not match; copy or save it again")
    if not stored.keys() >= set(aliases.values()) or stored.keys() & aliases.keys():
        raise CheckpointError(f"{source} is damaged: its tied names do not match its tensors")
    return stored | {alias: stored[name] for alias, name in aliases.items()}, config


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; opening a pipe would wait forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is a folder or a device: pass the path of a checkpoint file")
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy tensors into a model that has exactly these names and shapes.

    Everything is checked before anything is copied: a model that does not fit stays as it was. Precision may
    differ, but not the kind of number.

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
    model.load_state_dict(state)


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise what `load_into` would raise, and copy nothing; `model` may be on the meta device."""
    state = model.state_dict()
    found: defaultdict[str, list[str]] = defaultdict(list)
    first: dict[Hashable, str] = {}
    for name, ours in state.items():
        if name not in tensors:
            found["missing"].append(repr(name))
        elif (theirs := tensors[name]).shape != ours.shape:
            found["of another shape"].append(f"{name!r} {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
        elif _kind(theirs) != _kind(ours):
            found["of another kind of number"].append(f"{name!r} {theirs.dtype} instead of {ours.dtype}")
        elif not _same(tensors[other := first.setdefault(identity(name, ours), name)], theirs):
            found["tied in the model but not here"].append(f"{other!r} and {name!r}")
    found["unexpected"] = [repr(name) for name in tensors if name not in state]
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in found.items()
        if names
    ]
    if problems:
        raise CheckpointError(f"{source} does not fit {type(model).__name__}: {'; '.join(problems)}")


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.dtype == torch.bool, tensor.is_floating_point(), tensor.is_complex()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(((a == b) | (a.isnan() & b.isnan())).all())


def identity(name: str, tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same numbers in the same memory; empty ones all lie at address 0."""
    if tensor.numel() == 0:
        return name
    # Without data there is no address, but there is still a storage.
    address = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    place = (tensor.device, address, tensor.storage_offset(), tensor.dtype, tensor.is_neg())
    return (*place, tuple(tensor.shape), tensor.stride())


def _without_aliases(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors as safetensors takes them, and {name: first name} of those that are the same memory."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if not dense or tensor.is_complex() or tensor.is_quantized:
            raise CheckpointError(f"{name!r} is not a dense bool, int or float tensor with data")
        if (original := first.setdefault(identity(name, tensor), name)) != name:
            aliases[name] = original
            continue
        ready = tensor.detach().cpu().resolve_neg().contiguous()
        if ready.untyped_storage().data_ptr() in storages:
            ready = ready.clone()
        storages.add(ready.untyped_storage().data_ptr())
        stored[name] = ready
    return stored, aliases


def _checksum(text: str, stored: Mapping[str, Tensor]) -> str:
    """SHA-256 of the config and of all tensors, in the order of their names."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _end_of_header(file: BinaryIO, source: str) -> int:
    """Where a safetensors file's header ends, once it is known to be of reasonable length.

    Parsed JSON takes some 30 times its length, so a header may be long only where the tensors are large.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(9)
    end = 8 + int.from_bytes(start[:8], "little")
    if start[8:] != b"{" or end > size:
        raise CheckpointError(
            f"{source} is not a safetensors file, or is truncated; for a pickle of PyTorch, use "
            "ecoformer.load_official or torch.load(weights_only=True)"
        )
    if end > max(1 << 23, size // 8):
        raise CheckpointError(f"{source} is damaged: {end} of its {size} bytes are header")
    return end


def _open_envelope(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config, and {name: stored name} of tied tensors."""
    with blaming(f"the config in {source} is damaged", CheckpointError, MemoryError):
        envelope = json.loads(text)
        version, config, aliases = envelope["format"], envelope.get("config"), envelope.get("aliases", {})
        if type(version) is int and version > FORMAT:
            raise CheckpointError(
                f"{source} has format {version}, newer than {FORMAT}: upgrade ecoformer to read it"
            )
        sound = version == FORMAT and isinstance(config, dict)
        if not sound or not all(isinstance(name, str) for name in aliases.values()):
            raise ValueError(f"it does not have format {FORMAT}")
    return config, aliases
