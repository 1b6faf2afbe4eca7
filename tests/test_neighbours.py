"""What happens when timm and torchvision are imported beside ecoformer, each time in a process of its own."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("timm")

OPERATORS = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def python(script, *, path=None):
    """Standard output of a script, which must succeed."""
    lines = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    command = [sys.executable, "-c", lines + textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split("\n")[:-1]


def test_timm_after_ecoformer():
    out = python("""
        import sys
        import ecoformer
        print([n for n in ("timm", "torchvision", "transformers") if n in sys.modules])
        import importlib.util
        import timm, torchvision
        from importlib.machinery import SourceFileLoader
        print(all(type(m.__spec__.loader) is SourceFileLoader for m in (timm, torchvision)))
        print(all(m.__loader__ is m.__spec__.loader for m in (timm, torchvision)))
        print([m.__spec__.name for m in (timm, torchvision)], timm.__spec__.origin == timm.__file__)
        print("def create_model" in __import__("inspect").getsource(timm.models._factory))
        print(timm.__spec__.loader.get_filename("timm") == timm.__file__)
        print(*timm.list_models("ecoformer_*"))
        print(len(timm.list_models("ecoformer_*", module="pvt_v2")))
        model = timm.create_model("ecoformer_pvt_v2_b0", num_classes=3)
        print(type(model).__name__, sum(isinstance(m, ecoformer.EcoAttention) for m in model.modules()))
        print(len([f for f in sys.meta_path if type(f).__module__ == "ecoformer.neighbours"]))
        ecoformer._watch_imports()
        print(len([f for f in sys.meta_path if type(f).__module__ == "ecoformer.neighbours"]))
    """)
    assert out[:6] == ["[]", "True", "True", "['timm', 'torchvision'] True", "True", "True"]
    sizes = [f"ecoformer_pvt_v2_b{i}" for i in range(6)]
    sizes += [f"ecoformer_twins_svt_{size}" for size in ("base", "large", "small")]
    assert out[6].split() == sizes
    assert out[8:] == ["EcoPyramidVisionTransformerV2 6", "1", "1"]


def test_timm_before_ecoformer():
    out = python(
        OPERATORS
        + textwrap.dedent("""
        import timm
        print(len(timm.list_models("ecoformer_*")))
        import ecoformer
        print(len(timm.list_models("ecoformer_*")))
        print(timm.create_model("ecoformer_twins_svt_small", num_classes=3).num_classes)
        """)
    )
    assert out == ["0", "9", "3"]


def test_models_first():
    out = python("""
        import ecoformer.models.pvt_v2 as family
        import timm
        print(family.EcoPyramidVisionTransformerV2.__name__, len(timm.list_models("ecoformer_*")))
    """)
    assert out == ["EcoPyramidVisionTransformerV2 9"]


HIDDEN = """
import sys

class Without:
    \"\"\"The usual finder, for which some packages are not installed.\"\"\"

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in ("timm", "torchvision")
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
"""


def test_packages_that_are_not_there():
    out = python(
        HIDDEN
        + textwrap.dedent("""
        import importlib.util
        import ecoformer
        print(importlib.util.find_spec("timm"), importlib.util.find_spec("torchvision"))
        for name in ("timm", "torchvision", "timm.models", "ecoformer.models.pvt_v2"):
            try:
                __import__(name)
            except ModuleNotFoundError as error:
                print(name, error.name)
        print(ecoformer.EcoAttention(16, 2).num_heads)
        """)
    )
    assert out[0] == "None None"
    assert out[1:4] == ["timm timm", "torchvision torchvision", "timm.models timm"]
    assert out[4].startswith("ecoformer.models.pvt_v2 timm")
    assert out[5] == "2"


def test_a_package_that_is_blocked():
    assert python("import sys; sys.modules['timm'] = None; import ecoformer; print('there')") == ["there"]


def test_errors_inside_a_package_come_out(tmp_path):
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(
        "import sys\nsys.tried = getattr(sys, 'tried', 0) + 1\nimport not_there\n"
    )
    (tmp_path / "torchvision.py").write_text("raise ImportError('broken binary')\n")
    out = python(
        """
        import ecoformer, sys
        for name in ("timm", "timm", "torchvision"):
            try:
                __import__(name)
            except ImportError as error:
                print(type(error).__name__, error, name in sys.modules)
        print(sys.tried)
        """,
        path=tmp_path,
    )
    missing = "ModuleNotFoundError No module named 'not_there' False"
    assert out == [missing, missing, "ImportError broken binary False", "2"]


def test_looking_for_a_package_does_not_import_it(tmp_path):
    (tmp_path / "torchvision.py").write_text("name = 'fake'\n")
    out = python(
        """
        import ecoformer, importlib.util, pkgutil, sys, torch
        spec = importlib.util.find_spec("torchvision")
        print("torchvision" in sys.modules, spec.origin.endswith("torchvision.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.name, type(module.__spec__.loader).__name__)
        import importlib, torchvision
        print(importlib.reload(torchvision).name, type(torchvision.__spec__.loader).__name__)
        """,
        path=tmp_path,
    )
    assert out == ["False True", "fake SourceFileLoader", "fake SourceFileLoader"]


def test_a_loader_can_be_asked_before_the_import(tmp_path):
    # runpy, pkgutil.get_data, pyinstaller and coverage ask it for.
    (tmp_path / "torchvision.py").write_text("name = 'fake'\n")
    out = python(
        """
        import ecoformer, importlib.util
        loader = importlib.util.find_spec("torchvision").loader
        print(loader.get_filename("torchvision").endswith("torchvision.py"), loader.is_package("torchvision"))
        """,
        path=tmp_path,
    )
    assert out == ["True False"]
