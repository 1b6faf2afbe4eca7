"""Launches that go round Triton's binder: they must reach the code that the binder would have found."""

import pytest
import torch

pytest.importorskip("triton")

from ecoformer.backends.triton.launching import Kernel


class Compiled:
    """What Triton's launches return: code that is launched with all arguments and constants by position."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("direct", grid, arguments))


class Function:
    """Stands for a function under `triton.jit`."""

    arg_names = ("x", "stride", "scale", "out", "WIDTH", "BLOCK")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            self.log.append(("binder", grid, arguments))
            return Compiled(self.log)

        return launch


@pytest.fixture
def function():
    return Function()


OPTIONS = {"BLOCK": 64, "WIDTH": 32, "num_warps": 4}


def launch(kernel, x, stride=8, scale=0.5, grid=(3,), **options):
    out = torch.empty(4)
    kernel[grid](x, stride, scale, out, **{**OPTIONS, **options})
    return out


def test_the_second_launch_is_direct(function):
    kernel = Kernel(function, direct=True)
    x, other = torch.zeros(64), torch.ones(64)
    launch(kernel, x)
    out = launch(kernel, other, grid=(5,))
    assert [how for how, *_ in function.log] == ["binder", "direct"]
    _, grid, arguments = function.log[1]
    assert grid == (5, 1, 1)
    assert arguments[0] is other
    assert arguments[3] is out
    assert arguments[1:3] == (8, 0.5)
    assert arguments[4:] == (32, 64), "constants in the order of the function's arguments"


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"stride": 1},
        {"stride": 16},
        {"BLOCK": 32},
        {"WIDTH": 16},
        {"num_warps": 8},
    ],
    ids=["dtype", "alignment", "one", "divisible", "constant", "width", "option"],
)
def test_other_code_is_found_by_the_binder(function, change):
    kernel = Kernel(function, direct=True)
    launch(kernel, torch.zeros(64))
    launch(kernel, **{"x": torch.zeros(64), **change})
    assert [how for how, *_ in function.log] == ["binder", "binder"]


def test_launches_kept_are_bounded(function, monkeypatch):
    monkeypatch.setattr("ecoformer.backends.triton.launching._MOST", 2)
    kernel, x = Kernel(function, direct=True), torch.zeros(64)
    for stride in (2, 3, 4, 2):
        launch(kernel, x, stride)
    assert [how for how, *_ in function.log] == ["binder"] * 4


def test_a_launch_that_fails_is_not_kept(function):
    class Failing(Function):
        def __getitem__(self, grid):
            raise RuntimeError("too little shared memory")

    kernel = Kernel(Failing(), direct=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shared memory"):
            launch(kernel, torch.zeros(64))


def test_by_the_binder_alone(function):
    kernel, x = Kernel(function, direct=False), torch.zeros(64)
    launch(kernel, x)
    launch(kernel, x)
    assert [how for how, *_ in function.log] == ["binder", "binder"]
