"""The checkpoints that the paper's authors released, as models of this package.

`recognise` reads from names and shapes which model it is, `rename` gives every tensor our name, and
`load_official` builds the model and fills it. The released code differs from the paper; a loaded model
computes what the released code computes, by `official_attention`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn

from ecoformer import storage
from ecoformer.arguments import one_line
from ecoformer.checkpoints.describe import rebuild
from ecoformer.checkpoints.limits import build_within
from ecoformer.checkpoints.official_attention import OfficialEcoAttention
from ecoformer.storage import CheckpointError

Family = Literal["pvt_v2", "twins"]

_OWN_KEY: dict[Family, re.Pattern[str]] = {
    "pvt_v2": re.compile(r"(patch_embed|block|norm)[1-4]\."),
    "twins": re.compile(r"(patch_embeds|blocks|pos_block)\.[0-3]\."),
}
_REDUCED = re.compile(r"\.attn\.(q|kv|sr|norm)\.")
_ECO_KEY = re.compile(r"\.attn\.(to_qk|to_v|fast_attention)\.")
_TWINS_HEAD_DIM = 32


def load_official(source: str | os.PathLike[str] | Mapping[str, Any]) -> nn.Module:
    """The model of a checkpoint that the paper's authors released, in eval mode and ready to use.

    Args:
        source: a file, or what `torch.load` makes of it: a state dict, alone or as "model" in a dict. Files
            are read without running any code they might hold.

    Raises:
        CheckpointError: the file cannot be read, or its tensors are not exactly those of one released PVTv2
            or Twins-SVT model, with EcoFormer's or softmax attention. Nothing is loaded in part.
    """
    where, state = _state_of(source)
    try:
        _check_memory(state, None if isinstance(source, Mapping) else os.path.getsize(source))
        family, arguments = recognise(state)
        tensors = rename(state, family)
        description = _describe(family, arguments)
        model = build_within(lambda: rebuild(description), tensors, where)
        storage.load_into(model, tensors, source=where)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {str(error).removeprefix(where).lstrip()}") from None
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # sizes that no mechanism takes, tensors that cannot be copied
        raise CheckpointError(f"{where}: {one_line(error)}") from error
    return model.eval()


def recognise(state: Mapping[str, Tensor]) -> tuple[Family, dict[str, Any]]:
    """The family of a released state dict and the arguments of its model, from names and shapes."""
    family = _family_of(state)
    blocks = [f"block{i}" if family == "pvt_v2" else f"blocks.{i - 1}" for i in range(1, 5)]
    embeds = [f"patch_embed{i}" if family == "pvt_v2" else f"patch_embeds.{i - 1}" for i in range(1, 5)]
    shapes = [_shape(state, f"{embed}.proj.weight", 4) for embed in embeds]
    dims = [shape[0] for shape in shapes]
    hidden = [_shape(state, f"{block}.0.mlp.fc1.weight", 2)[0] for block in blocks]
    # PVTv2 has one head in its first stage; an eco block shows the width of its heads.
    head_dim, config = dims[0] if family == "pvt_v2" else _TWINS_HEAD_DIM, {}
    eco = any(map(_ECO_KEY.search, state))
    if eco:
        hasher = f"{blocks[0]}.0.attn.fast_attention.ksh"
        _, bits, support = _shape(state, f"{hasher}.A", 3)
        head_dim = _shape(state, f"{hasher}.anchor", 4)[-1]
        config = {"bits": bits, "support": support}
    if any(dim % head_dim or width % dim for dim, width in zip(dims, hidden, strict=True)):
        raise CheckpointError(
            f"stages of {dims} channels do not fit heads of {head_dim} and MLPs of {hidden}"
        )
    return family, {
        "attention": OfficialEcoAttention.name if eco else "softmax",
        "attention_config": config,
        "num_classes": _shape(state, "head.weight", 2)[0],
        "in_chans": shapes[0][1],
        "depths": tuple(_depth(state, block) for block in blocks),
        "embed_dims": tuple(dims),
        "num_heads": tuple(dim // head_dim for dim in dims),
        "mlp_ratios": tuple(width // dim for dim, width in zip(dims, hidden, strict=True)),
    }


def rename(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The same tensors under the names and in the shapes of our model, hashers marked as fitted."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        stem, _, matrix = key.rpartition("projection_matrix")
        if stem and not matrix and f"{stem}ksh.A" in state:
            continue  # the released code never reads it
        for name, value in _translated(_our_name(key, family), tensor).items():
            if name in renamed:
                raise CheckpointError(f"{key} and another key are both {name}")
            renamed[name] = value
    return renamed


def _our_name(key: str, family: Family) -> str:
    """Our name of a tensor; names that the released code does not have stay unknown."""
    if family == "pvt_v2":
        key = re.sub(r"^patch_embed1\.", "patch_embed.", key)
        key = re.sub(r"^(patch_embed|block|norm)([1-4])\.", _in_stage, key)
        key = key.replace(".mlp.dwconv.dwconv.", ".mlp.dwconv.")
        if key.startswith("stages.3."):
            return key  # conversion leaves the last stage as timm has it
    key = key.replace(".attn.to_", ".attn.").replace(".attn.fast_attention.ksh.", ".attn.hasher.")
    return key.replace(".attn.", ".attn.attention.")


def _in_stage(match: re.Match[str]) -> str:
    part = {"patch_embed": "downsample", "block": "blocks", "norm": "norm"}[match[1]]
    return f"stages.{int(match[2]) - 1}.{part}."


def _translated(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor as our model holds it; some become several."""
    layer, _, last = name.rpartition(".")
    if layer.startswith("stages.3.") and layer.endswith(".attn.qkv"):
        queries, dim = layer.removesuffix("kv"), len(tensor) // 3
        return {f"{queries}.{last}": tensor[:dim], f"{queries[:-1]}kv.{last}": tensor[dim:]}
    if not layer.endswith(".hasher"):
        return {name: tensor}
    if last == "A":
        # The width of the kernel is that of the tokens at hand, so sigma is never read.
        flags = {f"{layer}.sigma": torch.ones(len(tensor)), f"{layer}.fitted": torch.tensor(True)}
        return {f"{layer}.weight": tensor.mT, **flags}
    if last == "mvec":
        return {f"{layer}.mean": tensor.flatten(0, 2)}
    return {f"{layer}.support_samples" if last == "anchor" else name: tensor.squeeze(0)}


def _state_of(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Where the state dict comes from, in words, and the state dict without wrappings."""
    if isinstance(source, (str, os.PathLike)):
        where, loaded = str(os.fspath(source)), _load(source)
    elif isinstance(source, Mapping):
        where, loaded = "state dict", source
    else:
        raise TypeError(f"a checkpoint is a path or a state dict, got {type(source).__name__}")
    state = loaded["model"] if isinstance(loaded, Mapping) and "model" in loaded else loaded
    if not isinstance(state, Mapping) or not state:
        kind = "an empty one" if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"{where} is not a checkpoint: expected a state dict, got {kind}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            kind = f"{key!r}: {type(value).__name__}"
            raise CheckpointError(f"{where} is not a checkpoint: expected tensors by name, got {kind}")
    # DistributedDataParallel puts this before every name.
    wrapped = all(key.startswith("module.") for key in state)
    return where, {key.removeprefix("module.") if wrapped else key: value for key, value in state.items()}


def _check_memory(state: Mapping[str, Tensor], file_size: int | None) -> None:
    """Refuse tensors that are larger than the memory behind them, or than their file."""
    storages: dict[int, int] = {}
    for key, tensor in state.items():
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(f"{key} is not a plain dense tensor")
        memory = tensor.untyped_storage()
        storages[memory._cdata] = memory.nbytes()
    claimed, held = sum(tensor.nbytes for tensor in state.values()), sum(storages.values())
    if claimed > held or (file_size is not None and held > file_size):
        raise CheckpointError(
            f"its tensors claim {claimed} bytes, more than it holds: views must not repeat numbers"
        )


def _load(path: str | os.PathLike[str]) -> Any:
    where = os.fspath(path)
    with storage.open_regular(where) as file:
        try:
            _check_records(file)
            file.seek(0)
            # The released files keep the arguments of the training run beside the weights.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        # Other bytes end in whatever the unpickler stumbles over.
        except Exception as error:
            held = re.search(r"GLOBAL ([\w.]+)", str(error))
            reason = f"it is damaged, or not a PyTorch file ({one_line(error, 80)})"
            if held:
                remedy = "if you trust it, pass what torch.load(path, weights_only=False) gives"
                reason = f"it holds a {held[1]}; {remedy}"
            raise CheckpointError(f"{where} cannot be read as a checkpoint: {reason}") from error


def _check_records(file: BinaryIO) -> None:
    """Refuse a zip archive that unpacks to more than itself; torch.save compresses nothing."""
    if file.read(4) != b"PK\x03\x04":
        return
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        records, comment = archive.infolist(), archive.comment
    packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
    # With a comment or a prefix, torch and zipfile could read different lists of records.
    moved = bool(comment) or min((record.header_offset for record in records), default=0) > 0
    if packed or moved or sum(record.file_size for record in records) > size:
        raise ValueError("its records are compressed or overlap")


def _family_of(state: Mapping[str, Tensor]) -> Family:
    if any(".attn.attention." in key for key in state):
        raise CheckpointError("a model of ecoformer's own, not a released one: use ecoformer.load")
    reduced = [key for key in state if _REDUCED.search(key)]
    if reduced:
        raise CheckpointError(
            f"weights of an original model with spatial reduction ({reduced[0]}): load them with timm, and "
            "convert that model with ecoformer.convert"
        )
    votes = {family: sum(map(bool, map(own.match, state))) for family, own in _OWN_KEY.items()}
    family = max(votes, key=lambda name: votes[name])
    if not votes[family]:
        raise CheckpointError(f"no released PVTv2 or Twins checkpoint has keys like {next(iter(state))}")
    return family


def _depth(state: Mapping[str, Tensor], block: str) -> int:
    """Number of blocks; indices that leave gaps turn up as unexpected names later."""
    found = (re.match(rf"{re.escape(block)}\.(\d+)\.", key) for key in state)
    return len({match[1] for match in found if match})


def _shape(state: Mapping[str, Tensor], key: str, dimensions: int) -> tuple[int, ...]:
    if key not in state:
        raise CheckpointError(f"{key} is missing, so the model cannot be recognised")
    shape = tuple(state[key].shape)
    if len(shape) != dimensions or 0 in shape:
        raise CheckpointError(f"{key} is {shape}, not a tensor of {dimensions} dimensions")
    return shape


def _describe(family: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """How `rebuild` makes the model."""
    conversions: list[dict[str, Any]] = []
    if family == "twins":
        # timm's last stage has windows of 7 x 7; the released one sees the complete image at every size.
        layers = [f"blocks.3.{i}.attn" for i in range(arguments["depths"][-1])]
        conversions = [{"mechanism": "softmax", "layers": {layer: {} for layer in layers}}]
    sizes = importlib.import_module(f"ecoformer.models.{family}").SIZES
    # The timm name of the model, or of the most similar one of its family.
    name = max(sizes, key=lambda n: sum(sizes[n][key] == arguments[key] for key in ("embed_dims", "depths")))
    model = {"library": "timm", "name": f"ecoformer_{name}", "arguments": arguments}
    return {"model": model, "conversions": conversions}
