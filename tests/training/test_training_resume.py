"""A run that is killed anywhere and resumed is the run that was not: same bytes, same metrics."""

from __future__ import annotations

import signal

import pytest
from training_runs import MASKED, PICTURES, PLAIN, die, file_operations, in_child, recipe, whole

from ecoformer.training import train
from ecoformer.training.loop import Trainer


def killed(chosen, folder, before) -> None:
    status = in_child(lambda: train(chosen, folder, show=False), before)
    assert status == -signal.SIGKILL


def operations(chosen, folder, report) -> int:
    """How many file operations a whole run makes."""
    in_child(
        lambda: train(chosen, folder, show=False),
        lambda: file_operations(folder, lambda n: report.open("a").write(".")),
    )
    return len(report.read_text())


def die_at(number, folder):
    def act(count):
        if count == number:
            die()

    return lambda: file_operations(folder, act)


def killed_everywhere(tmp_path, chosen, points) -> None:
    expected = whole(chosen, tmp_path / "whole")
    total = operations(chosen, tmp_path / "counted", tmp_path / "count")
    assert total > 40
    for point in points(total):
        folder = tmp_path / f"killed-{point}"
        killed(chosen, folder, die_at(point, folder))
        found = whole(chosen, folder, resume=folder.exists())
        assert found == expected, f"killed before file operation {point} of {total}"


def test_killed_before_some_file_operations(tmp_path):
    killed_everywhere(
        tmp_path, recipe(PLAIN, "keep=1", folder=tmp_path), lambda total: range(1, total, total // 8)
    )


@pytest.mark.slow
@pytest.mark.parametrize("base", [PLAIN, MASKED, PICTURES], ids=["plain", "masked", "pictures"])
def test_killed_before_every_file_operation(tmp_path, base):
    step = 1 if base is PLAIN else 5
    chosen = recipe(base, "keep=1", folder=tmp_path)
    killed_everywhere(tmp_path, chosen, lambda total: range(1, total + 1, step))


@pytest.mark.parametrize("base", [MASKED, PICTURES], ids=["masked", "pictures"])
def test_killed_in_a_step(tmp_path, base):
    chosen = recipe(base, folder=tmp_path)
    expected = whole(chosen, tmp_path / "whole")

    def before():
        loss = Trainer._loss

        def deadly(self, *args):
            if self.progress.step == 5:
                die()
            return loss(self, *args)

        Trainer._loss = deadly

    killed(chosen, tmp_path / "run", before)
    assert whole(chosen, tmp_path / "run", resume=True) == expected
