"""Our models on the Hub, without a network: folders, and an API that only takes notes."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import hub_mixin

import ecoformer
from ecoformer import CheckpointError
from ecoformer.checkpoints import hub

timm = pytest.importorskip("timm")
from ecoformer.models.pvt_v2 import EcoPyramidVisionTransformerV2  # noqa: E402
from ecoformer.models.twins import EcoTwins  # noqa: E402

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
PVT = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64), "num_heads": (1, 2, 5, 8)}
TWINS = {"depths": (2, 2, 2, 2), "embed_dims": (16, 32, 64, 128), "num_heads": (2, 4, 8, 16)}
CLASSES = {
    EcoPyramidVisionTransformerV2: ("ecoformer_pvt_v2_b0", PVT),
    EcoTwins: ("ecoformer_twins_svt_small", TWINS),
}
both = pytest.mark.parametrize("cls", CLASSES)
pytestmark = pytest.mark.usefixtures("no_network")


def made(cls, *, by_name=True, **kwargs):
    """A model in eval mode whose hashers, where it has any, are fitted."""
    torch.manual_seed(0)
    name, sizes = CLASSES[cls]
    arguments = {"num_classes": 10, "attention_config": {"bits": 8, "support": 4}} | sizes | kwargs
    model = timm.create_model(name, **arguments) if by_name else cls(**arguments)
    if ecoformer.hashers_of(model):
        ecoformer.fit_hashers(model, [IMAGES], options=ecoformer.FitOptions(steps=2), progress=False)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IMAGES.to(next(model.parameters()).dtype))


@both
def test_there_and_back(cls, tmp_path):
    """What was done to a model after it was built is in the folder too."""
    model = made(cls, by_name=cls is EcoTwins).bfloat16()
    model.reset_classifier(3)
    ecoformer.convert(model, "softmax", layers="*.0.*")
    assert model.save_pretrained(tmp_path / "model") is None
    files = {"model.safetensors", "config.json", "README.md"}
    assert {p.name for p in (tmp_path / "model").iterdir()} == files
    again = cls.from_pretrained(tmp_path / "model")
    assert type(again) is cls
    assert not any(module.training for module in again.modules())
    hashers = ecoformer.hashers_of(again)
    assert hashers.keys() == ecoformer.hashers_of(model).keys()
    assert all(bool(hasher.fitted) for hasher in hashers.values())
    assert (again.num_classes, next(again.parameters()).dtype) == (3, torch.bfloat16)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(str(tmp_path / "again"))
    assert torch.equal(logits(ecoformer.load(tmp_path / "again" / "model.safetensors")), logits(model))


def test_config_and_card_tell_the_truth(tmp_path):
    model = made(EcoPyramidVisionTransformerV2, attention_config={"bits": 8, "support": 4, "local": (3, 3)})
    model.reset_classifier(3)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attention"] == "eco"
    assert config["attention_config"] == {"bits": 8, "support": 4, "local": [3, 3]}
    assert config["depths"] == [1, 1, 1, 1]
    assert config["num_classes"] == 3
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "ecoformer"
    assert card.data.license == "apache-2.0"


def test_push(tmp_path, monkeypatch):
    calls = []

    def create_repo(self, repo_id, **kwargs):
        calls.append(("create", repo_id, kwargs["private"], self.token))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, **kwargs):
        calls.append(("upload", repo_id, sorted(p.name for p in folder_path.iterdir())))
        shutil.copytree(folder_path, tmp_path / "there")
        return "the commit"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    model = made(EcoTwins)
    assert model.push_to_hub("someone/model", private=True, token="hf_no_real_one") == "the commit"
    assert calls == [
        ("create", "someone/model", True, "hf_no_real_one"),
        ("upload", "someone/model", ["README.md", "config.json", "model.safetensors"]),
    ]
    assert torch.equal(logits(EcoTwins.from_pretrained(tmp_path / "there")), logits(model))


def test_from_a_repository(tmp_path, monkeypatch):
    model, asked = made(EcoTwins), []
    model.save_pretrained(tmp_path)

    def download(*, repo_id, filename, revision, local_files_only, **kwargs):
        asked.append((repo_id, filename, revision, local_files_only))
        return str(tmp_path / filename)

    monkeypatch.setattr(hub_mixin, "hf_hub_download", download)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    again = EcoTwins.from_pretrained("someone/model", revision="v1", local_files_only=True)
    assert asked == [("someone/model", name, "v1", True) for name in ("config.json", "model.safetensors")]
    assert torch.equal(logits(again), logits(model))


def test_what_is_refused(tmp_path):
    model = made(EcoTwins, attention="softmax", attention_config=None)
    model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a EcoTwins, not a EcoPyramidVisionTransformerV2"):
        EcoPyramidVisionTransformerV2.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_classes"):
        EcoTwins.from_pretrained(tmp_path, num_classes=3)
    (tmp_path / "config.json").unlink()
    assert isinstance(EcoTwins.from_pretrained(tmp_path), EcoTwins)
    file = tmp_path / "model.safetensors"
    torch.save(model.state_dict(), file)
    with pytest.raises(CheckpointError, match="pickle"):
        EcoTwins.from_pretrained(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        EcoTwins.from_pretrained(tmp_path)
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        EcoTwins.from_pretrained("someone/nowhere", local_files_only=True, cache_dir=tmp_path / "cache")
