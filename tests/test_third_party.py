"""timm and torchvision beside ecoformer, each time in a process of its own."""

import pathlib
import subprocess
import sys

import pytest

from ecoformer import third_party

pytest.importorskip("timm")
REPAIR = "from ecoformer.third_party import repair_torchvision; repair_torchvision()\n"


def python(script):
    """Standard output of a script, which must succeed."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("imports", ["import timm, ecoformer.models", "import ecoformer.models, timm"])
def test_models_are_registered_by_their_package(imports):
    script = f"""
{imports}
print(*timm.list_models("ecoformer_*"))
print(type(timm.create_model("ecoformer_twins_svt_small", num_classes=3)).__name__)
"""
    names, model = python(REPAIR + script)
    sizes = [f"ecoformer_pvt_v2_b{i}" for i in range(6)]
    assert names.split() == sizes + [f"ecoformer_twins_svt_{size}" for size in ("base", "large", "small")]
    assert model == "EcoTwins"


def test_text_encoders_do_not_need_timm():
    script = "import sys; sys.modules['timm'] = None; from ecoformer.models.text import TextEncoder"
    assert python(f"{script}; print(TextEncoder(length=8).classes)") == ["2"]


def test_builds_that_do_not_match_are_named_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"torchvision .* are different builds"):
        third_party.import_library("broken")


def test_the_extras_that_errors_name_exist():
    project = (pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert [extra for extra in third_party.EXTRAS if f"\n{extra} = [" not in project] == []
