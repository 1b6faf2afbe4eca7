"""Launches that are repeated without Triton's binder: they must be those that it would have made."""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from ecoformer.backends.fused import CannotRun
from ecoformer.backends.triton import plans
from ecoformer.backends.triton.configs import Config, Sizes, reduce, trial
from ecoformer.backends.triton.plans import Plan


class Compiled:
    """What Triton's launches return: code that is launched with all arguments and constants by position."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("direct", grid, arguments))


class Function:
    """Stands for a function under `triton.jit`."""

    arg_names = ("x", "stride", "scale", "between", "out", "WIDTH", "BLOCK")

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


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(plans, "DIRECT", True)
    plans.forget()
    yield
    plans.forget()


def nothing_smaller():
    return None


class Example(Plan):
    """One launch from x through memory for the time of the call to an output."""

    def __init__(self, function, x, shrink=nothing_smaller):
        super().__init__(x.device, [None, x])
        place = self.slots[1]
        self.scratch((3,), torch.int16)
        between, out = self.scratch((5, 2)), self.output((4,), torch.float16)
        self.launch(
            function, 3, shrink, place, *place.strides, 0.5, between, out, BLOCK=64, WIDTH=32, num_warps=4
        )


@pytest.fixture
def made(monkeypatch):
    """All memory that was asked for, in order."""
    seen, empty = [], torch.empty

    def spy(*arguments, **named):
        seen.append(empty(*arguments, **named))
        return seen[-1]

    monkeypatch.setattr(plans.torch, "empty", spy)
    return seen


def run(function, x, **options):
    return plans.run(plans.form(x), lambda: Example(function, x, **options), [None, x])[1]


def test_the_second_launch_is_direct(function):
    x, other = torch.zeros(64), torch.ones(64)
    (first,), (second,) = run(function, x), run(function, other)
    (how, grid, arguments), (again, grid_again, numbers) = function.log
    assert (how, again) == ("binder", "direct")
    assert (grid, grid_again) == ((3,), (3, 1, 1))
    assert arguments[0].data_ptr() == x.data_ptr()
    assert arguments[4].data_ptr() == first.data_ptr()
    assert numbers[0] == other.data_ptr()
    assert numbers[4] == second.data_ptr()
    assert numbers[1:3] == arguments[1:3] == (1, 0.5)
    assert numbers[5:] == (32, 64), "constants in the order of the function's arguments"


def test_outputs_are_new_each_time(function):
    (first,), (second,) = run(function, torch.zeros(64)), run(function, torch.zeros(64))
    assert first.data_ptr() != second.data_ptr()
    assert (second.shape, second.dtype) == ((4,), torch.float16)


def test_memory_for_the_time_of_the_call(function, made):
    """It is aligned, of the right dtype, and apart from what else lies there."""
    x = torch.zeros(64)
    run(function, x)
    between = function.log[0][2][3]
    assert between.dtype == torch.float32
    assert between.numel() >= 10
    assert between.data_ptr() == made[-1].data_ptr() + 256
    run(function, x)
    assert function.log[1][2][3] == made[-1].data_ptr() + 256


def test_a_launch_leaves_the_plan_as_it_was(function):
    """Threads share it."""
    x = torch.zeros(64)
    plan = plans.run("key", lambda: Example(function, x), [None, x])[0]
    before = [list(ready.arguments) for ready in plan._ready[True, True, True, True]]
    plans.run("key", lambda: None, [None, x])
    assert [ready.arguments for ready in plan._ready[True, True, True, True]] == before
    assert isinstance(before[0][0], plans.Slot)


def test_addresses_that_16_does_not_divide_share_code(function):
    for offset in (4, 8, 12):
        run(function, torch.zeros(80)[offset // 4 :][:64])
    assert [how for how, *_ in function.log] == ["binder", "direct", "direct"]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(64, dtype=torch.bfloat16),
        torch.zeros(65)[1:],
        torch.zeros(128)[::2],
        torch.zeros(80),
    ],
    ids=["dtype", "alignment", "strides", "shape"],
)
def test_other_code_is_found_by_the_binder(function, x):
    run(function, torch.zeros(64))
    run(function, x)
    run(function, x)
    assert [how for how, *_ in function.log] == ["binder", "binder", "direct"]


def test_plans_kept_are_bounded(function, monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 2)
    for size in (2, 3, 4, 2):
        run(function, torch.zeros(size))
    assert [how for how, *_ in function.log] == ["binder"] * 4


def test_by_the_binder_alone(function, monkeypatch):
    monkeypatch.setattr(plans, "DIRECT", False)
    run(function, torch.zeros(64))
    run(function, torch.zeros(64))
    assert [how for how, *_ in function.log] == ["binder", "binder"]


class Large(Function):
    """Fits on the chip from the third trial."""

    def __getitem__(self, grid):
        launch = super().__getitem__(grid)

        def attempt(*arguments, **named):
            compiled = launch(*arguments, **named)
            if len(self.log) < 3:
                raise OutOfResources(300_000, 200_000, "shared memory")
            return compiled

        return attempt


def test_what_does_not_fit_is_made_smaller():
    function, sizes = Large(), Sizes(2, 64, 16, 16, 25, 16, torch.float32)
    shrunk = []

    def shrink():
        shrunk.append(reduce("gather", sizes, Config(64, 2, 4 - len(shrunk), 8)))
        return shrunk[-1]

    with trial(gather=Config(64, 2, 4, 8)):
        run(function, torch.zeros(64), shrink=shrink)
        run(function, torch.zeros(64), shrink=shrink)
    assert len(shrunk) == 2
    assert [how for how, *_ in function.log] == ["binder"] * 3 + ["direct"]


def test_what_cannot_be_made_smaller_cannot_run():
    for _ in range(2):
        with pytest.raises(CannotRun, match="too little shared memory"):
            run(Large(), torch.zeros(64))


def test_other_configurations_make_other_plans(function):
    run(function, torch.zeros(64))
    with trial(gather=Config(64, 2, 4, 8)):
        run(function, torch.zeros(64))
    run(function, torch.zeros(64))
    assert [how for how, *_ in function.log] == ["binder"] * 3
