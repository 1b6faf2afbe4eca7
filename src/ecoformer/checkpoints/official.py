"""The checkpoints that the paper's authors released, as models of this package.

The way of a checkpoint: a file or state dict → `recognise` reads off what model it is → `rename` checks every
tensor and gives it our name → `load_official` builds the model and fills it. The released code differs from
the paper in the bias, the kernel width and sign(0); a loaded model computes what the released code computes.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ecoformer import storage
from ecoformer.arguments import one_line
from ecoformer.storage import CheckpointError
from ecoformer.third_party import import_timm

Family = Literal["pvt_v2", "twins"]
Mechanism = Literal["eco", "softmax"]

STAGES = 4
RELEASED = {"bias": "official", "sigma": "input", "sign_of_zero": 0}
"""Where the released code's eco attention differs from the paper's, in words of `EcoAttention`."""
_WIDE = (64, 128, 320, 512)
_VARIANTS: dict[Family, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "pvt_v2": {
        "b0": ((32, 64, 160, 256), (2, 2, 2, 2)),
        "b1": (_WIDE, (2, 2, 2, 2)),
        "b2": (_WIDE, (3, 4, 6, 3)),
        "b3": (_WIDE, (3, 4, 18, 3)),
        "b4": (_WIDE, (3, 8, 27, 3)),
        "b5": (_WIDE, (3, 6, 40, 3)),
    },
    "twins": {
        "svt_small": ((64, 128, 256, 512), (2, 2, 10, 4)),
        "svt_base": ((96, 192, 384, 768), (2, 2, 18, 2)),
        "svt_large": ((128, 256, 512, 1024), (2, 2, 18, 2)),
    },
}
"""Widths and depths of the models that have a name."""
_OWN_KEY: dict[Family, re.Pattern[str]] = {
    "pvt_v2": re.compile(r"(patch_embed|block|norm)[1-4]\."),
    "twins": re.compile(r"(patch_embeds|blocks|pos_block)\.[0-3]\."),
}
_REDUCED = re.compile(r"\.attn\.(q|kv|sr|norm)\.")
_ECO_KEY = re.compile(r"\.attn\.(to_qk|to_v|fast_attention)\.")
_TWINS_HEAD_DIM = 32
_NAMED = 4
"""How many keys an error names."""


@dataclass(frozen=True)
class Layout:
    """What a released state dict says about its model."""

    family: Family
    mechanism: Mechanism
    """Of all stages but the last, which is softmax in either case."""
    in_chans: int
    num_classes: int
    depths: tuple[int, ...]
    embed_dims: tuple[int, ...]
    num_heads: tuple[int, ...]
    mlp_ratios: tuple[int, ...]
    bits: int | None = None
    support: int | None = None

    @property
    def model_name(self) -> str:
        """The model's name in timm, or that of the nearest of its family where it has none of its own."""
        known = _VARIANTS[self.family]
        shape = (self.embed_dims, self.depths)
        exact = [name for name, variant in known.items() if variant == shape]
        as_wide = [name for name, (dims, _) in known.items() if dims == self.embed_dims]
        return f"ecoformer_{self.family}_{[*exact, *as_wide, *known][0]}"


def load_official(source: str | os.PathLike[str] | Mapping[str, Any]) -> nn.Module:
    """The model of a checkpoint that the paper's authors released, in eval mode and ready to use.

    Args:
        source: a file, or what `torch.load` makes of it: a state dict, alone or as "model" in a dict. Files
            are read without running any code they might hold.

    Raises:
        CheckpointError: the file cannot be read, or its tensors are not all those of one released PVTv2 or
            Twins-SVT model, with EcoFormer's or softmax attention. Nothing is loaded in part.
    """
    where, state = _state_of(source)
    try:
        layout = recognise(state)
        tensors = rename(state, layout)
        _check_memory(state)
        model = _build(layout)
        model.load_state_dict(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # sizes that no mechanism takes, tensors that cannot be copied
        raise CheckpointError(f"{where}: {one_line(error)}") from error
    return model.eval()


def recognise(state_dict: Mapping[str, Tensor]) -> Layout:
    """What model a released state dict belongs to, from its names and shapes."""
    family = _family_of(state_dict)
    mechanism: Mechanism = "eco" if any(map(_ECO_KEY.search, state_dict)) else "softmax"
    embeds = [f"{_embed(family, i)}.proj.weight" for i in range(STAGES)]
    mlps = [f"{_block(family, i, 0)}.mlp.fc1.weight" for i in range(STAGES)]
    hashes = f"{_block(family, 0, 0)}.attn.fast_attention.ksh"
    telling = {"head.weight": 2, **dict.fromkeys(embeds, 4), **dict.fromkeys(mlps, 2)}
    if mechanism == "eco":
        telling |= {f"{hashes}.A": 3, f"{hashes}.anchor": 4}
    shapes = _shapes(state_dict, telling)
    dims = tuple(shapes[key][0] for key in embeds)
    hidden = tuple(shapes[key][0] for key in mlps)
    # PVTv2 has one head in its first stage; an eco block says how wide its heads are.
    head_dim = dims[0] if family == "pvt_v2" else _TWINS_HEAD_DIM
    bits = support = None
    if mechanism == "eco":
        _, bits, support = shapes[f"{hashes}.A"]
        head_dim = shapes[f"{hashes}.anchor"][-1]
    if any(dim % head_dim or width % dim for dim, width in zip(dims, hidden, strict=True)):
        raise CheckpointError(
            f"stages of {dims} channels do not fit heads of {head_dim} and MLPs of {hidden}"
        )
    return Layout(
        family,
        mechanism,
        in_chans=shapes[embeds[0]][1],
        num_classes=shapes["head.weight"][0],
        depths=tuple(_depth(state_dict, family, i) for i in range(STAGES)),
        embed_dims=dims,
        num_heads=tuple(dim // head_dim for dim in dims),
        mlp_ratios=tuple(width // dim for dim, width in zip(dims, hidden, strict=True)),
        bits=bits,
        support=support,
    )


def rename(state_dict: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The same tensors under the names and in the shapes of our model, hashers marked as fitted.

    Raises a CheckpointError that names missing and unknown keys and wrong shapes, unless there are none.
    """
    _check(state_dict, layout)
    renamed: dict[str, Tensor] = {}
    for part in _parts(layout):
        for kind in ("weight", "bias"):
            tensor = state_dict[f"{part.theirs}.{kind}"]
            if part.ours.endswith(".attn.qkv"):
                # A layer that conversion leaves alone is timm's, which keeps queries apart.
                layer, dim = part.ours.removesuffix(".qkv"), len(tensor) // 3
                renamed[f"{layer}.q.{kind}"], renamed[f"{layer}.kv.{kind}"] = tensor[:dim], tensor[dim:]
            else:
                renamed[f"{part.ours}.{kind}"] = tensor
    for theirs, ours, heads in _hashers(layout):
        renamed[f"{ours}.weight"] = state_dict[f"{theirs}.A"].mT
        renamed[f"{ours}.mean"] = state_dict[f"{theirs}.mvec"].flatten(0, 2)
        renamed[f"{ours}.support_samples"] = state_dict[f"{theirs}.anchor"].squeeze(0)
        # The width of the kernel is that of the tokens at hand, so this one is never read.
        renamed[f"{ours}.sigma"] = torch.ones(heads)
        renamed[f"{ours}.fitted"] = torch.tensor(True)
    return renamed


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
        raise CheckpointError(f"{where} is no checkpoint: a state dict was expected, got {kind}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            kind = f"{key!r}: {type(value).__name__}"
            raise CheckpointError(f"{where} is no checkpoint: a state dict holds tensors by name, got {kind}")
    # DistributedDataParallel puts this before every name.
    wrapped = all(key.startswith("module.") for key in state)
    return where, {key.removeprefix("module.") if wrapped else key: value for key, value in state.items()}


def _check_memory(state: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are larger than the memory behind them, which a copy would need."""
    storages: dict[int, int] = {}
    for key, tensor in state.items():
        dense = tensor.layout == torch.strided and not tensor.is_meta
        if not dense or type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(f"{key} is not a plain dense tensor")
        memory = tensor.untyped_storage()
        storages[memory._cdata] = memory.nbytes()
    wanted, held = sum(tensor.nbytes for tensor in state.values()), sum(storages.values())
    if wanted > held:
        raise CheckpointError(
            f"its tensors are views that repeat {held} bytes of numbers until they are {wanted} bytes"
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
    converted = [key for key in state if ".attn.attention." in key]
    if converted:
        raise CheckpointError(
            f"saved from a model of ecoformer's own, not a released one: {_list(converted)}"
        )
    reduced = [key for key in state if _REDUCED.search(key)]
    if reduced:
        raise CheckpointError(
            "weights of an original model with spatial reduction, not an EcoFormer checkpoint: "
            f"{_list(reduced)}. Load them with timm, as in timm.create_model('pvt_v2_b0', pretrained=True), "
            "and make that model an EcoFormer with ecoformer.convert(model, 'eco')"
        )
    votes = {family: sum(map(bool, map(own.match, state))) for family, own in _OWN_KEY.items()}
    family = max(votes, key=lambda name: votes[name])
    if not votes[family]:
        raise CheckpointError(f"no released PVTv2 or Twins checkpoint has keys like {_list(list(state))}")
    return family


def _depth(state: Mapping[str, Tensor], family: Family, stage: int) -> int:
    """Number of blocks; indices that leave gaps come up as unknown keys later."""
    stem = re.escape(_block(family, stage, 0).removesuffix("0"))
    found = (re.match(rf"{stem}(\d+)\.", key) for key in state)
    return len({match[1] for match in found if match})


def _shapes(state: Mapping[str, Tensor], telling: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the layout is read off, by name and number of dimensions."""
    missing = [key for key in telling if key not in state]
    shapes = {key: tuple(state[key].shape) for key in telling if key in state}
    misfits = [
        f"{key} is {sizes}, not of {telling[key]} dimensions"
        for key, sizes in shapes.items()
        if len(sizes) != telling[key] or 0 in sizes
    ]
    _complain("what model this is cannot be told", missing, [], misfits)
    return shapes


class _Part(NamedTuple):
    """A layer with a weight of this shape and a bias as long as its first dimension."""

    theirs: str
    ours: str
    shape: tuple[int, ...]


def _embed(family: Family, stage: int) -> str:
    return f"patch_embed{stage + 1}" if family == "pvt_v2" else f"patch_embeds.{stage}"


def _block(family: Family, stage: int, index: int) -> str:
    return f"block{stage + 1}.{index}" if family == "pvt_v2" else f"blocks.{stage}.{index}"


def _our_block(family: Family, stage: int, index: int) -> str:
    return f"stages.{stage}.blocks.{index}" if family == "pvt_v2" else f"blocks.{stage}.{index}"


def _parts(layout: Layout) -> Iterator[_Part]:
    """Every layer of the model with a weight and a bias."""
    channels = layout.in_chans
    for i, dim in enumerate(layout.embed_dims):
        yield from _around_blocks(layout.family, i, channels, dim)
        for j in range(layout.depths[i]):
            yield from _of_block(layout, i, j)
        channels = dim
    if layout.family == "twins":
        yield _Part("norm", "norm", (channels,))
    yield _Part("head", "head", (layout.num_classes, channels))


def _around_blocks(family: Family, stage: int, channels: int, dim: int) -> Iterator[_Part]:
    """Patch embedding, and the stage's norm (PVTv2) or position convolution (Twins)."""
    theirs = _embed(family, stage)
    if family == "twins":
        ours, size = theirs, 4 if stage == 0 else 2
        position = f"pos_block.{stage}.proj.0"
        yield _Part(position, position, (dim, 1, 3, 3))
    else:
        ours, size = f"stages.{stage}.downsample" if stage else "patch_embed", 3 if stage else 7
        yield _Part(f"norm{stage + 1}", f"stages.{stage}.norm", (dim,))
    yield _Part(f"{theirs}.proj", f"{ours}.proj", (dim, channels, size, size))
    yield _Part(f"{theirs}.norm", f"{ours}.norm", (dim,))


def _of_block(layout: Layout, stage: int, index: int) -> Iterator[_Part]:
    theirs, ours = _block(layout.family, stage, index), _our_block(layout.family, stage, index)
    dim = layout.embed_dims[stage]
    hidden = layout.mlp_ratios[stage] * dim
    for name in ("norm1", "norm2"):
        yield _Part(f"{theirs}.{name}", f"{ours}.{name}", (dim,))
    yield _Part(f"{theirs}.mlp.fc1", f"{ours}.mlp.fc1", (hidden, dim))
    yield _Part(f"{theirs}.mlp.fc2", f"{ours}.mlp.fc2", (dim, hidden))
    if layout.family == "pvt_v2":
        yield _Part(f"{theirs}.mlp.dwconv.dwconv", f"{ours}.mlp.dwconv", (hidden, 1, 3, 3))
    last = stage == STAGES - 1
    layer = f"{ours}.attn" if last and layout.family == "pvt_v2" else f"{ours}.attn.attention"
    if layout.mechanism == "eco" and not last:
        yield _Part(f"{theirs}.attn.to_qk", f"{layer}.qk", (dim, dim))
        yield _Part(f"{theirs}.attn.to_v", f"{layer}.v", (dim, dim))
    else:
        yield _Part(f"{theirs}.attn.qkv", f"{layer}.qkv", (3 * dim, dim))
    yield _Part(f"{theirs}.attn.proj", f"{layer}.proj", (dim, dim))


def _hashers(layout: Layout) -> Iterator[tuple[str, str, int]]:
    """Their name, our name and the number of heads of every hasher."""
    if layout.mechanism == "softmax":
        return
    for i in range(STAGES - 1):
        for j in range(layout.depths[i]):
            theirs = f"{_block(layout.family, i, j)}.attn.fast_attention.ksh"
            ours = f"{_our_block(layout.family, i, j)}.attn.attention.hasher"
            yield theirs, ours, layout.num_heads[i]


def _expected(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in _parts(layout):
        shapes[f"{part.theirs}.weight"] = part.shape
        shapes[f"{part.theirs}.bias"] = part.shape[:1]
    head_dim = layout.embed_dims[0] // layout.num_heads[0]
    bits, support = layout.bits or 0, layout.support or 0
    for theirs, _, heads in _hashers(layout):
        shapes[f"{theirs}.A"] = (heads, bits, support)
        shapes[f"{theirs}.mvec"] = (1, heads, 1, support)
        shapes[f"{theirs}.anchor"] = (1, heads, support, head_dim)
    return shapes


def _check(state: Mapping[str, Tensor], layout: Layout) -> None:
    expected = _expected(layout)
    unused = {theirs.removesuffix("ksh") + "projection_matrix" for theirs, _, _ in _hashers(layout)}
    misfits = [
        f"{key} is {tuple(state[key].shape)} of {state[key].dtype}, not {shape} of floating point"
        for key, shape in expected.items()
        if key in state and (state[key].shape != shape or not state[key].is_floating_point())
    ]
    _complain(
        f"not a released {layout.model_name.removeprefix('ecoformer_')} with {layout.mechanism} attention",
        [key for key in expected if key not in state],
        [key for key in state if key not in expected and key not in unused],
        misfits,
    )


def _complain(verdict: str, missing: list[str], unknown: list[str], misfits: list[str]) -> None:
    """One error about everything that is wrong, if anything is."""
    kinds = {"missing key": missing, "unknown key": unknown, "tensor that does not fit": misfits}
    problems = [f"{len(found)} x {kind}: {_list(found)}" for kind, found in kinds.items() if found]
    if problems:
        raise CheckpointError(f"{verdict}: {'; '.join(problems)}")


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _build(layout: Layout) -> nn.Module:
    try:
        timm = import_timm()
    except ModuleNotFoundError as error:
        raise ImportError("released models need timm: pip install 'ecoformer[vision]'") from error
    from ecoformer.conversion import convert

    config: dict[str, Any] = {}
    if layout.mechanism == "eco":
        config = {"bits": layout.bits, "support": layout.support, **RELEASED}
    model: nn.Module = timm.create_model(
        layout.model_name,
        attention=layout.mechanism,
        attention_config=config,
        num_classes=layout.num_classes,
        in_chans=layout.in_chans,
        depths=layout.depths,
        embed_dims=layout.embed_dims,
        num_heads=layout.num_heads,
        mlp_ratios=layout.mlp_ratios,
    )
    if layout.family == "twins":
        # timm's last stage has windows of 7 x 7; the released one sees the whole image at every size.
        convert(model, "softmax", layers=[f"blocks.{STAGES - 1}.*"])
    return model
