"""Small files take little memory and little time, whatever they ask for: they are loaded or refused."""

import io
import json
import os
import subprocess
import sys
import zipfile

import pytest
import released
import torch

import ecoformer
from ecoformer import CheckpointError, load_official, storage
from ecoformer.models.text import TextEncoder

pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
HUGE = 10**9


def text(**arguments):
    return {"library": "ecoformer", "name": "TextEncoder", "arguments": arguments}


def timm(name, **arguments):
    return {"library": "timm", "name": name, "arguments": arguments}


def bert(cls="BertModel", **config):
    return {"library": "transformers", "name": cls, "config": BERT | config}


MODELS = {
    "width beyond 2^63 bytes": text(length=10**7, dim=10**12, attention="softmax", num_heads=1),
    "overflow on meta": timm("vit_tiny_patch16_224", embed_dim=3 * 10**13),
    "depths, in sum": timm("pvt_v2_b0", depths=[16_000] * 10_000),
    "labels": bert("BertForSequenceClassification", num_labels=HUGE),
    "depth, less": text(depth=16_000, attention="eco"),
    "bits": text(attention="klsh_eco", attention_config={"bits": 16_000, "support": 16_000}, dim=10_000),
    "a ratio": timm("vit_tiny_patch16_224", mlp_ratio=1e300),
    "images": timm("ecoformer_pvt_v2_b0", img_size=16_000, attention="linformer"),
}

CHILD = """
import json, pathlib, re, sys, time, warnings
from ecoformer.third_party import repair_torchvision
repair_torchvision()
import ecoformer, ecoformer.models.pvt_v2, torch, transformers
warnings.simplefilter("ignore")
transformers.BertModel, transformers.BertForSequenceClassification

def peak():
    "Kilobytes; getrusage would count the process that started this one."
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

for line in sys.stdin:
    kind, path = json.loads(line)
    call = getattr(ecoformer, kind)
    memory, start = peak(), time.monotonic()
    try:
        call(path)
        problem = "loaded"
    except ecoformer.CheckpointError as error:
        problem = "" if "\\n" not in str(error) else "more than one line"
    except BaseException as error:
        problem = repr(error)
    print(json.dumps([problem, (peak() - memory) // 1024, time.monotonic() - start]), flush=True)
"""


def test_tensors_must_be_large_to_allow_large_numbers(tmp_path):
    """An empty tensor of a large shape holds nothing, so it allows nothing."""
    description = {"model": text(depth=10**8), "conversions": [], "settings": {}}
    path = storage.write(tmp_path / "x", {"a": torch.zeros(10**12, 0)}, description)
    with pytest.raises(CheckpointError, match="depth"):
        ecoformer.load(path)


def test_what_load_would_refuse_is_not_saved(tmp_path):
    narrow = TextEncoder(
        length=20_000, dim=2, num_heads=1, vocabulary=4, hidden=2, depth=1, attention="softmax"
    )
    with pytest.raises(CheckpointError, match="length=20000"):
        ecoformer.save(narrow.half(), tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "record",
    [
        {"mechanism": "performer", "layers": {"self_attn": {"features": 10**8}}},
        {"mechanism": "linformer", "layers": {"self_attn": {"seq_len": 16_000, "k": 16_000}}},
        {"mechanism": "softmax", "layers": {f"layer{i}": {} for i in range(1000)}},
    ],
    ids=["features", "tokens", "many"],
)
def test_conversions_of_a_given_model(record, tmp_path):
    def layer():
        return torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    path = ecoformer.save(layer(), tmp_path / "x")
    tensors, description = storage.read(path)
    storage.write(path, tensors, description | {"conversions": [record]})
    with pytest.raises(CheckpointError):
        ecoformer.load(path, layer())


@pytest.mark.parametrize("config", [{"num_hidden_layers": HUGE}, {"num_hidden_layers": 16_000}], ids=str)
def test_folders_of_transformers(config, tmp_path):
    sizes = transformers.BertConfig(**BERT, vocab_size=50)
    transformers.BertModel(sizes).save_pretrained(tmp_path)
    assert isinstance(ecoformer.load(tmp_path), transformers.BertModel)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers|larger model"):
        ecoformer.load(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="config"):
            ecoformer.load(tmp_path)


def large_state():
    """A released model of 10^9 classes whose tensors lie in a few bytes."""
    state = released.state_dict("pvt_v2_b0", num_classes=7, seed=1, depths=(1, 1, 1, 1))
    return {key: value for key, value in state.items() if not key.startswith("head.")}


def stride_zero():
    return large_state() | {
        "head.weight": torch.zeros(1).expand(4_000_000, 256),
        "head.bias": torch.zeros(1).expand(4_000_000),
    }


def one_storage():
    state = released.state_dict("pvt_v2_b0", num_classes=7, seed=1, depths=(6, 6, 6, 6))
    memory = torch.zeros(max(value.numel() for value in state.values()))
    return {key: memory[: value.numel()].view(value.shape) for key, value in state.items()}


def without_storage():
    return large_state() | {
        "head.weight": torch.zeros(4_000_000, 256, device="meta"),
        "head.bias": torch.zeros(4_000_000, device="meta"),
    }


def deflated(path, state):
    """The same archive, compressed."""
    content = io.BytesIO()
    torch.save(state, content)
    with zipfile.ZipFile(content) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))


def hostile_files(folder):
    """Each file with the name of the function that is to refuse it."""
    for name, model in MODELS.items():
        description = {"model": model, "conversions": [], "settings": {}}
        yield "load", storage.write(folder / name, {"a": torch.zeros(1)}, description)
    sizes = {"dim": 256, "hidden": 1024, "depth": 200, "attention": "softmax"}
    with torch.device("meta"):
        names = TextEncoder(**sizes).state_dict()
    shared = {x.shape: torch.zeros(x.shape) for x in names.values()}
    description = {"model": text(**sizes), "conversions": [], "settings": {}}
    yield "load", storage.write(folder / "tied", {k: shared[x.shape] for k, x in names.items()}, description)
    for make in (stride_zero, one_storage, without_storage):
        torch.save(make(), folder / make.__name__)
        yield "load_official", folder / make.__name__
    zeros = large_state() | {"head.weight": torch.zeros(150_000, 256), "head.bias": torch.zeros(150_000)}
    deflated(folder / "deflated", zeros)
    yield "load_official", folder / "deflated"


def test_small_files_take_little_memory_and_time(tmp_path):
    files = list(hostile_files(tmp_path))
    assert all(path.stat().st_size < 10_000_000 for _, path in files)
    request = "".join(json.dumps([kind, str(path)]) + "\n" for kind, path in files)
    command = [sys.executable, "-c", CHILD]
    answers = subprocess.run(
        command, input=request, text=True, stdout=subprocess.PIPE, timeout=300, check=True
    )
    for (_, path), line in zip(files, answers.stdout.splitlines(), strict=True):
        problem, megabytes, seconds = json.loads(line)
        assert (path.name, problem) == (path.name, "")
        assert megabytes < 300, path.name
        assert seconds < 10, path.name


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "dict"])
@pytest.mark.parametrize("kind", ["sparse", "meta", "float8", "bits"])
def test_released_tensors_of_other_kinds(kind, as_file, tmp_path):
    """Loaded, or refused with the documented error."""
    sizes = {"num_classes": 7, "seed": 1, "depths": (1, 1, 1, 1)} | ({"bits": 200} if kind == "bits" else {})
    source = released.state_dict("pvt_v2_b0", **sizes)
    x = source["head.weight"]
    if kind != "bits":
        odd = {"sparse": x.to_sparse(), "meta": x.to("meta"), "float8": x.to(torch.float8_e4m3fn)}[kind]
        source["head.weight"] = odd
    if as_file:
        torch.save(source, tmp_path / "x")
        source = tmp_path / "x"
    try:
        model = load_official(source)
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert isinstance(model, torch.nn.Module)


def test_released_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="folder or a device"):
            load_official(path)
    with pytest.raises(FileNotFoundError):
        load_official(tmp_path / "nowhere")
