"""Pictures: what they show, how they are written, and what they refuse."""

from __future__ import annotations

import sys

import matplotlib
import pytest

from ecoformer.report.figures import accuracy_figure, check_target, save, shares_figure
from ecoformer.report.ours import figure2

POINTS = [
    {"label": "softmax", "energy_pj": 9.25e9, "accuracy": 0.7144},
    {"label": "eco", "energy_pj": 2.49e9, "accuracy": 0.7123},
]


def test_figure_2():
    rows = figure2()
    figure = shares_figure(rows)
    softmax, eco = figure.axes
    assert (softmax.get_title(), eco.get_title()) == ("softmax", "eco")
    heights = [[bar.get_height() for bar in bars] for bars in softmax.containers]
    assert [sum(column) for column in zip(*heights, strict=True)] == pytest.approx([100] * 5)
    assert heights[0][0] == pytest.approx(78.5, abs=0.05)
    assert {"78%", "18%", "9.25 mJ", "73.4 mJ"} <= {text.get_text() for text in softmax.texts}


def test_accuracy_has_a_point_a_row():
    figure = accuracy_figure(POINTS)
    assert [text.get_text() for text in figure.legends[0].texts] == ["softmax", "eco"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == pytest.approx([9.25, 2.49])


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_files_by_suffix_and_the_same_twice(tmp_path, suffix, start):
    settings = dict(matplotlib.rcParams)
    first, second = (save(accuracy_figure(POINTS), tmp_path / f"{i}{suffix}").read_bytes() for i in range(2))
    assert first.startswith(start)
    assert first == second
    assert dict(matplotlib.rcParams) == settings


def test_targets_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jpg must end in \.png, \.svg, \.pdf, got '\.jpg'"):
        check_target("a.jpg")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        check_target(tmp_path / "nowhere" / "a.png")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(
        ImportError, match=r"^matplotlib is not installed: pip install 'ecoformer\[figures\]'$"
    ):
        check_target("a.png")
