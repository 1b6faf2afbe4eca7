"""Figure 2: what it shows, and how it is written."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pytest

from ecoformer.report.figures import check_target, save_shares, shares_figure
from ecoformer.report.ours import figure2


def test_figure_2():
    softmax, eco = shares_figure(figure2()).axes
    assert (softmax.get_title(), eco.get_title()) == ("softmax", "eco")
    heights = [[bar.get_height() for bar in bars] for bars in softmax.containers]
    assert [sum(column) for column in zip(*heights, strict=True)] == pytest.approx([100] * 5)
    assert heights[0][0] == pytest.approx(78.5, abs=0.05)
    assert {"78%", "18%", "9.25 mJ", "73.4 mJ"} <= {text.get_text() for text in softmax.texts}


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_files_by_suffix_and_the_same_twice(tmp_path, suffix, start):
    settings, files = dict(matplotlib.rcParams), [tmp_path / f"{i}{suffix}" for i in range(2)]
    for file in files:
        save_shares([{"model": "a", "mechanism": "eco", "attention": 1, "ffn": 2, "other": 1}], file)
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(start)
    assert first == second
    assert dict(matplotlib.rcParams) == settings


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(
        ImportError, match=r"^matplotlib is not installed: pip install 'ecoformer\[figures\]'$"
    ):
        check_target(Path("a.png"))
