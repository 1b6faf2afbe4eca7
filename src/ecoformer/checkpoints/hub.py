"""Our models on the Hugging Face Hub: `from_pretrained`, `save_pretrained` and `push_to_hub`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelHubMixin, constants, hf_hub_download
from torch import nn
from typing_extensions import Self

from ecoformer.checkpoints.describe import current_arguments
from ecoformer.checkpoints.files import load, save

FILE = constants.SAFETENSORS_SINGLE_FILE


class HubMixin(
    ModelHubMixin,
    library_name="ecoformer",
    tags=["ecoformer", "linear-attention"],
    license="apache-2.0",
    paper_url="https://arxiv.org/abs/2209.09004",
):
    """Adds `from_pretrained`, `save_pretrained` and `push_to_hub`, with the file that `save` writes."""

    def _save_pretrained(self, save_directory: Path) -> None:
        model = cast(nn.Module, self)
        # config.json is written from this: classifiers may have been replaced since the model was built.
        self._hub_mixin_config = current_arguments(model)
        save(model, save_directory / FILE)
        card = save_directory / "README.md"
        if card.is_symlink() and not card.exists():  # it would be written through
            card.unlink()

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        **model_kwargs: Any,
    ) -> Self:
        path = Path(model_id) / FILE
        if not path.parent.is_dir():
            path = Path(
                hf_hub_download(
                    repo_id=model_id,
                    filename=FILE,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    token=token,
                    local_files_only=local_files_only,
                )
            )
        model = load(path, device=map_location)
        known = _as_json(current_arguments(model) or {})
        for key, value in _as_json(model_kwargs).items():
            if known.get(key, value) != value:
                raise ValueError(
                    f"{path} holds a model with {key}={known[key]!r}, not {value!r}: load it and change it "
                    "then, as with reset_classifier"
                )
        if not isinstance(model, cls):
            raise TypeError(
                f"{path} holds a {type(model).__name__}, not a {cls.__name__}: use ecoformer.load(path)"
            )
        return model


def _as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """As config.json gives them back: tuples become lists."""
    result: dict[str, Any] = json.loads(json.dumps(arguments, default=repr))
    return result
