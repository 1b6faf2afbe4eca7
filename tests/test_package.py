"""What `import ecoformer` brings along, and what the package says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ecoformer

HEAVY = (
    "accelerate",
    "matplotlib",
    "numba",
    "pandas",
    "PIL",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
)
HEAVY += ("torchvision", "transformers", "triton", "torch._dynamo", "torch._inductor")

# Without collections: a pass over all that torch has made would be ours or not, by chance. The processor's
# time, as other tests run beside.
FRESH_IMPORT = """
import gc, json, sys, time
gc.disable()
start = time.process_time()
import torch
middle, before = time.process_time(), set(sys.modules)
import ecoformer
print(json.dumps({
    "torch": middle - start,
    "ecoformer": time.process_time() - middle,
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "dtype": str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled(),
}))
"""


@pytest.fixture(scope="module")
def fresh_imports():
    """Three imports, each in a process of its own; warnings at import are errors."""
    command = [sys.executable, "-W", "error:::ecoformer", "-c", FRESH_IMPORT]
    return [json.loads(subprocess.check_output(command, text=True)) for _ in range(3)]


def test_import_brings_nothing_heavier_than_torch(fresh_imports):
    modules = fresh_imports[0]["modules"]
    assert [m for m in modules if any(m == h or m.startswith(f"{h}.") for h in HEAVY)] == []


def test_import_is_quick(fresh_imports):
    assert min(run["ecoformer"] for run in fresh_imports) < 0.3


def test_import_starts_no_device_and_changes_no_setting(fresh_imports):
    plain = "import torch; print(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())"
    expected = subprocess.check_output([sys.executable, "-c", plain], text=True).split()
    run = fresh_imports[0]
    assert run["cuda"] is False
    assert [str(run[key]) for key in ("threads", "dtype", "grad")] == expected


def test_public_names_exist_and_are_documented():
    assert [name for name in ecoformer.__all__ if not hasattr(ecoformer, name)] == []
    assert len(set(ecoformer.__all__)) == len(ecoformer.__all__)
    undocumented = [n for n in ecoformer.__all__ if not getattr(ecoformer, n).__doc__]
    assert undocumented == []


def test_contracted_names_are_public():
    contract = {"hash_attention", "pack_codes", "unpack_codes", "HashAttentionState", "EcoAttention"}
    contract |= {"KernelHasher", "KlshHasher", "LshHasher", "SignHasher", "fit_hashers"}
    contract |= {"create_attention", "list_attentions"}
    assert contract <= set(ecoformer.__all__)


def test_version_is_that_of_the_project_file():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    version = next(line for line in text.splitlines() if line.startswith("version = "))
    assert version == f'version = "{ecoformer.__version__}"'


def test_types_are_shipped():
    assert (Path(ecoformer.__file__).parent / "py.typed").exists()
