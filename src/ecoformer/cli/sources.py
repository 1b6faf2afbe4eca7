"""Opening a model by a name, a file or a folder, and making inputs for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecoformer.arguments import one_line
from ecoformer.checkpoints import CheckpointError, folders, load, load_official
from ecoformer.checkpoints.limits import check_images, offline
from ecoformer.storage import blaming
from ecoformer.third_party import check_timm_name, import_library, import_timm

_TOKENIZER = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")
_IMAGES = "preprocessor_config.json"
_CONFIGS = ("config.json", _IMAGES, *_TOKENIZER, "vocab*", "merges.txt", "special_tokens_map.json", "*.model")
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Source:
    """A model, what it is, and the folder of transformers that it is from."""

    model: nn.Module
    what: str
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    @cached_property
    def tokenizer(self) -> Callable[..., Any] | None:
        """The tokeniser in the folder, if there is one."""
        loaded: Callable[..., Any] | None = self._prepare("Tokenizer", *_TOKENIZER)
        return loaded

    @cached_property
    def images(self) -> Callable[[Any], Tensor] | None:
        """How the model in the folder wants a PIL image to be prepared, if it says so."""
        processor = self._prepare("ImageProcessor", _IMAGES)
        check_images(processor.to_dict() if processor else {}, _IMAGES)
        return processor and (lambda image: processor(image, return_tensors="pt")["pixel_values"][0])

    def _prepare(self, kind: str, *files: str) -> Any:
        if self.folder is None or not any((self.folder / file).is_file() for file in files):
            return None
        with blaming(f"the {kind} of {self.what} cannot be loaded by transformers"), offline():
            cls = getattr(import_library("transformers"), f"Auto{kind}")
            return cls.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)


def open_model(
    name: str,
    *,
    architecture: str | None = None,
    pretrained: bool = False,
    resolution: int | None = None,
    tokens: int | None = None,
    needs_weights: bool = False,
    shapes_only: bool = False,
) -> Source:
    """Open a model.

    The name is a file of `ecoformer.save` or of the authors of EcoFormer; weights of the timm model
    `architecture`; a folder written by `save_pretrained` of transformers or ours; or a model of timm or on
    the Hugging Face Hub. Models without trained weights are built for `resolution` and `tokens`, and with
    `shapes_only` on the meta device.
    """
    path = Path(name)
    if architecture is not None and not path.is_file():
        raise ValueError(f"--model is for a weights file, but {name} is not a file")
    if pretrained and (path.is_dir() or path.is_file()):
        raise ValueError(f"--pretrained is for the name of a model, but {name} has its own weights")
    if path.is_file():
        return _from_weights(path, architecture) if architecture else _from_file(path)
    sizes = {"resolution": resolution, "tokens": tokens}
    with torch.device("meta") if shapes_only else contextlib.nullcontext():
        if not path.is_dir():
            return _from_name(name, pretrained, sizes)
        random = shapes_only or not (needs_weights or folders.has_weights(path))
        return _from_folder(path, f"{path.name}/", sizes if random else None)


def _from_name(name: str, pretrained: bool, sizes: dict[str, int | None]) -> Source:
    path = Path(name)
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin") or len(path.parts) > 2 or path.is_absolute():
        raise FileNotFoundError(f"no such file: {name}")
    if name == "lra_text":
        from ecoformer.models.text import TextEncoder

        encoder = TextEncoder(attention="softmax", length=sizes["tokens"] or 4096)
        return Source(encoder.eval(), "text encoder lra_text")
    timm_name = name.removeprefix("timm/")
    if _is_timm(timm_name):
        notes = () if pretrained else (f"the weights of {name} are random: --pretrained starts from timm's",)
        model = _timm(timm_name, sizes["resolution"], pretrained=pretrained)
        return Source(model, f"timm model {timm_name}", notes=notes)
    folder = _download(name, _CONFIGS)
    if pretrained or not folders.is_of_transformers(folder):
        return _from_folder(_download(name, (*_CONFIGS, *_WEIGHTS)), name)
    return _from_folder(folder, name, sizes)


def _is_timm(name: str) -> bool:
    try:
        return bool(import_timm().is_model(name))
    except ModuleNotFoundError:  # models of transformers do not need it
        return False


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    """A folder with these files of a repository on the Hugging Face Hub, from its cache if possible."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        where = "is not a file or a folder, nor a model on the Hugging Face Hub"
        problem = f"{name!r} {where} ({_no_file(error)})"
        if "/" not in name:
            with contextlib.suppress(ModuleNotFoundError):
                check_timm_name(name, f"{problem}, nor of timm")
        raise ValueError(problem) from error


def _no_file(error: Exception) -> str:
    """Why the Hugging Face Hub gave no file."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return "no network, and it is not in the cache; pass a folder or a file instead"
    return "no such model" if isinstance(error, RepositoryNotFoundError) else one_line(error, 120)


def _from_file(path: Path) -> Source:
    try:
        if _is_safetensors(path):
            return Source(load(path), f"checkpoint {path.name}")
        return Source(load_official(path), f"released checkpoint {path.name}")
    except CheckpointError as error:
        hint = "weights of a timm model need its name: ecoformer convert --model pvt_v2_b0"
        raise CheckpointError(f"{str(error).rstrip('.')}; {hint}") from error


def _is_safetensors(path: Path) -> bool:
    """By the name or the first bytes: the header's length, then JSON."""
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _from_weights(path: Path, architecture: str) -> Source:
    timm_models = import_library("timm.models")
    with blaming(f"{path.name} is damaged, or not a file of weights", MemoryError):
        state = timm_models.load_state_dict(str(path), weights_only=True)
    names = ("head.weight", "fc.weight", "classifier.weight")
    head = next((state[name] for name in names if name in state), None)
    model = _timm(architecture, **({} if head is None else {"num_classes": head.shape[0]}))
    with blaming(f"{path.name} does not fit {architecture}"):
        timm_models.load_checkpoint(model, str(path), strict=True, weights_only=True)
    return Source(model, f"timm model {architecture} with the weights of {path.name}")


def _from_folder(path: Path, name: str, sizes: dict[str, int | None] | None = None) -> Source:
    """A model of ours or of transformers in a folder; with `sizes`, that of its config, weights random."""
    with blaming(f"{name} cannot be read"):
        ours = folders.is_ours(path)
    if ours:
        with torch.device("cpu"):
            return Source(load(path), f"checkpoint {name}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"folder {path} has no config.json: was it written by save_pretrained?")
    logging = import_library("transformers.utils.logging")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    notes: tuple[str, ...] = ()
    if sizes is None:
        model = folders.load_transformers(path, name=name, safetensors_only=False)
    else:
        model = folders.build_transformers(path, name, **sizes)
        notes = (f"the weights of {name} are random: --pretrained loads the trained ones",)
    return Source(model, f"transformers model {name}", notes, path)


def _timm(name: str, image_size: int | None = None, **arguments: Any) -> nn.Module:
    check_timm_name(name, f"{name!r} is not a timm model")
    create = import_timm().create_model
    model: nn.Module
    if image_size is not None:
        with contextlib.suppress(TypeError):  # models for images of any size have no such argument
            model = create(name, img_size=image_size, **arguments)
            return model.eval()
    try:
        model = create(name, **arguments)
    except OSError as error:  # raised by downloads
        raise OSError(f"the weights of {name} cannot be downloaded ({_no_file(error)})") from error
    return model.eval()


def inputs_of(
    model: Any, resolution: int | None = None, tokens: int | None = None
) -> Callable[[int], Tensor]:
    """A function that makes a batch of inputs.

    By default images have the model's own size, and texts are as long as the model takes.
    """
    kind, config, takes = type(model).__name__, getattr(model, "config", None), input_name(model)
    if takes == "input_ids":
        if resolution is not None:
            raise ValueError(f"--resolution is for images, but {kind} takes texts: pass --tokens")
        longest = longest_text(model)
        length = tokens or longest
        if length > longest:
            raise ValueError(f"--tokens {length}: texts of this {kind} have {longest} tokens at most")
        ids = (2, min(257, config.get_text_config().vocab_size if config else 257))
        return lambda n: torch.randint(*ids, (n, length), generator=_generator(n))
    if takes != "pixel_values":
        raise ValueError(f"{kind} takes {takes}: a command can make texts (input_ids) and images only")
    if tokens is not None:
        raise ValueError(f"--tokens is for texts, but {kind} takes images: pass --resolution")
    settings = getattr(model, "pretrained_cfg", None) or {}
    own: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = resolution or own or getattr(config, "image_size", None) or settings.get("input_size", (224,))[-2:]
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    channels: Any = getattr(model, "in_chans", None) or getattr(config, "num_channels", 3)
    return lambda n: torch.randn(n, channels, height, width, generator=_generator(n))


def input_name(model: Any) -> str:
    """What a model takes, by transformers' names: texts are "input_ids", images "pixel_values"."""
    ours = type(model).__module__ == "ecoformer.models.text"
    return "input_ids" if ours else getattr(model, "main_input_name", "pixel_values")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def longest_text(model: Any) -> int:
    """How many tokens a text may have; 512 where there is no limit."""
    if not hasattr(model, "config"):  # ours
        return int(getattr(model, "length", 512))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the id of padding on.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return int(getattr(model.config, "max_position_embeddings", 512))
