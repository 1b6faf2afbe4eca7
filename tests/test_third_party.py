"""timm and torchvision beside ecoformer, each time in a process of its own."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

from ecoformer import third_party

pytest.importorskip("timm")
REPAIR = "from ecoformer.third_party import repair_torchvision; repair_torchvision()\n"
# A torchvision of another build fails in this way.
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def python(script, *, path=None):
    """Standard output of a script, which must succeed."""
    lines = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    command = [sys.executable, "-c", lines + textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_import_leaves_other_packages_alone():
    out = python("""
        import sys, torch
        finders, operators = list(sys.meta_path), dir(torch.ops.torchvision)
        import ecoformer
        print(sys.meta_path == finders, dir(torch.ops.torchvision) == operators)
        print([n for n in ("timm", "torchvision", "transformers") if n in sys.modules])
    """)
    assert out == ["True True", "[]"]


@pytest.mark.parametrize("first", ["timm", "ecoformer.models"])
def test_models_are_registered_by_their_package(first):
    second = "timm" if first != "timm" else "ecoformer.models"
    script = f"""
import {first}
import {second}
print(*timm.list_models("ecoformer_*"))
print(type(timm.create_model("ecoformer_twins_svt_small", num_classes=3)).__name__)
"""
    names, model = python(REPAIR + script)
    sizes = [f"ecoformer_pvt_v2_b{i}" for i in range(6)]
    assert names.split() == sizes + [f"ecoformer_twins_svt_{size}" for size in ("base", "large", "small")]
    assert model == "EcoTwins"


def test_without_timm():
    out = python("""
        import sys
        sys.modules["timm"] = None
        import ecoformer.models.text
        print(ecoformer.models.text.TextEncoder(length=8).classes)
        try:
            import ecoformer.models.pvt_v2
        except ModuleNotFoundError as error:
            print(error.name)
    """)
    assert out[0] == "2"
    assert out[1].startswith("timm")


def test_builds_that_do_not_match_are_named_in_one_line(tmp_path):
    (tmp_path / "timm.py").write_text(BROKEN)
    out = python(
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            import ecoformer.models
        print(*[w.message for w in caught])
        from ecoformer.third_party import check_timm_name
        try:
            check_timm_name("pvt_v2_b0", "")
        except ImportError as error:
            print(error)
        """,
        path=tmp_path,
    )
    assert len(out) == 2
    assert all("torchvision" in line and "different builds" in line for line in out)


def test_a_load_registers_our_models(tmp_path):
    saved = f"""
import ecoformer, ecoformer.models, timm
small = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))
ecoformer.save(timm.create_model("ecoformer_pvt_v2_b0", **small), {str(tmp_path / "m.safetensors")!r})
"""
    python(REPAIR + saved)
    load = f"import ecoformer; print(type(ecoformer.load({str(tmp_path / 'm.safetensors')!r})).__name__)"
    assert python(REPAIR + load) == ["EcoPyramidVisionTransformerV2"]


def test_the_extras_that_errors_name_exist():
    project = (pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert [extra for extra in third_party.EXTRAS if f"\n{extra} = [" not in project] == []
