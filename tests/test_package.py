"""What `import ecoformer` brings along, and what the package says of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ecoformer

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    "accelerate",
    "matplotlib",
    "pandas",
    "PIL",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
}
HEAVY |= {"torchvision", "transformers", "triton", "torch._dynamo", "torch._inductor"}
# The processor's time, as other tests run beside, and without collections of all that torch has made.
FRESH_IMPORT = """
import gc, json, sys, time
gc.disable()
import torch
settings = torch.get_num_threads(), torch.get_default_dtype(), sys.meta_path[:], dir(torch.ops.torchvision)
start, before = time.process_time(), set(sys.modules)
import ecoformer
print(json.dumps({
    "seconds": time.process_time() - start,
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "same": settings == (torch.get_num_threads(), torch.get_default_dtype(), sys.meta_path,
                         dir(torch.ops.torchvision)),
}))
"""


def test_import_is_quick_and_changes_nothing():
    """Three times, each in a process of its own; warnings at import are errors."""
    command = [sys.executable, "-W", "error:::ecoformer", "-c", FRESH_IMPORT]
    runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(3)]
    modules = runs[0]["modules"]
    assert [m for m in modules if any(m == h or m.startswith(f"{h}.") for h in HEAVY)] == []
    assert min(run["seconds"] for run in runs) < 0.3
    assert not runs[0]["cuda"]
    assert runs[0]["same"]


def test_public_names_exist_and_are_documented():
    assert [name for name in ecoformer.__all__ if not hasattr(ecoformer, name)] == []
    assert len(set(ecoformer.__all__)) == len(ecoformer.__all__)
    assert [name for name in ecoformer.__all__ if not getattr(ecoformer, name).__doc__] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel, built from an unpacked source distribution that was built from this folder, offline."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "out"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, source)

    def build(kind, folder):
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
        run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return out / run.stdout.splitlines()[-1]

    with tarfile.open(build("sdist", source)) as archive:
        archive.extractall(out, filter="data")
    return build("wheel", out / f"ecoformer-{ecoformer.__version__}")


def test_the_wheel_holds_every_file_of_the_package(built):
    assert built.name.startswith(f"ecoformer-{ecoformer.__version__}-py3-none-")
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()]
    ours = {str(file) for file in files if not {"__pycache__", "ecoformer.egg-info"} & set(file.parts)}
    assert "ecoformer/py.typed" in ours
    assert ours <= set(zipfile.ZipFile(built).namelist())


def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    """What it depends on is found elsewhere; an editable installation there is not, on PYTHONPATH."""
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", built]
    subprocess.run([*map(str, install), "--quiet", "--disable-pip-version-check"], check=True)
    others = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = [tmp_path / "bin" / "ecoformer", "tables", "operation_energy_45nm"]
    out = subprocess.run(command, env=others, capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "fp32_mul" in out.stdout
