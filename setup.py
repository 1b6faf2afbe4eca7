"""The kernels in C, an optional part of the package; pyproject.toml has everything else."""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O2", "-g0", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
SOURCES = ["src/ecoformer/ops/cpu.c", "src/ecoformer/ops/integer.c"]


class BuildLibrary(build_ext):
    """A plain shared library, which is loaded by ctypes: the same for all versions of Python and PyTorch."""

    def get_ext_filename(self, fullname: str) -> str:
        """The file's name, without Python's version."""
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: it is no module of Python."""
        return ext.export_symbols


class PlatformWheel(bdist_wheel):
    """A wheel for this system and any Python 3."""

    def finalize_options(self) -> None:
        """It holds compiled code."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """For any Python 3 on this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("ecoformer.ops._cpu", SOURCES, extra_compile_args=FLAGS, optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
