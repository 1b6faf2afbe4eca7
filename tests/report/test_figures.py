"""Pictures: what they show, how they are written, and what they refuse."""

from __future__ import annotations

import json
import sys

import matplotlib
import pytest

from ecoformer.report.figures import accuracy_figure, accuracy_rows, check_target, save, shares_figure

SHARES = [
    {"model": f"pvt_v2_b{i}", "mechanism": name, "attention": 3e9, "ffn": (1 + i) * 1e9, "other": 0.1e9}
    for name in ("softmax", "eco")
    for i in range(3)
]
POINTS = [
    {"label": "transformer", "energy_pj": 9.25e9, "accuracy": 0.7144},
    {"label": "eco", "energy_pj": 2.49e9, "accuracy": 0.7123},
    {"label": "linformer", "energy_pj": 2.6e9, "accuracy": 0.7122},
]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def names(figure):
    return [text.get_text() for legend in figure.legends for text in legend.texts]


def test_shares_sum_to_100_and_the_total_is_named():
    figure = shares_figure(SHARES)
    softmax, eco = figure.axes
    assert (softmax.get_title(), eco.get_title()) == ("softmax", "eco")
    heights = [[bar.get_height() for bar in bars] for bars in softmax.containers]
    assert [sum(column) for column in zip(*heights, strict=True)] == pytest.approx([100, 100, 100])
    assert heights[0][0] == pytest.approx(100 * 3 / 4.1)
    assert {"73%", "24%", "4.1 mJ", "6.1 mJ"} <= set(texts(softmax))
    assert [label.get_text() for label in softmax.get_xticklabels()] == [
        "pvt_v2_b0",
        "pvt_v2_b1",
        "pvt_v2_b2",
    ]
    assert "energy" in softmax.get_ylabel()


def test_accuracy_has_a_point_a_row():
    figure = accuracy_figure(POINTS)
    assert names(figure) == ["transformer", "eco", "linformer"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == pytest.approx([9.25, 2.49, 2.6])


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
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


def test_rows_of_result_files(tmp_path):
    row = {"label": "eco", "energy_pj": 2e9, "accuracy": 0.71, "more": 1}
    for i, content in enumerate(([row], {"command": "x", "figures": {"rows": [row]}})):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(content))
        assert accuracy_rows(path) == [{"label": "eco", "energy_pj": 2e9, "accuracy": 0.71}]


@pytest.mark.parametrize("content", ["{", "3", "{}", '[{"label": "a", "accuracy": 3}]', "[3]"])
def test_result_files_that_will_not_do(tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=r"r\.json does not hold rows with label, energy_pj and accuracy"):
        accuracy_rows(tmp_path / "r.json")
