"""Pictures: what they show, how they are written, and what they refuse."""

from __future__ import annotations

import builtins
import json

import matplotlib
import pytest

from ecoformer.bitfusion import simulate_layer
from ecoformer.report.figures import (
    accuracy_figure,
    accuracy_rows,
    bitfusion_figure,
    shares_figure,
    sweep_figure,
)
from ecoformer.report.style import check_target, colour_of, readable, save

SHARES = [
    {"model": f"pvt_v2_b{i}", "mechanism": name, "attention": 3e9, "ffn": (1 + i) * 1e9, "other": 0.1e9}
    for name in ("softmax", "eco")
    for i in range(3)
]
SWEEP = [
    {"mechanism": name, "value": n, "energy_pj": factor * n**power}
    for name, power, factor in [
        ("softmax", 4, 1),
        ("eco", 2, 2),
        ("performer", 2, 2.1),
        ("linformer", 2, 2.2),
    ]
    for n in (224, 448, 896)
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


def test_shares_are_of_the_whole_and_the_whole_is_named():
    figure = shares_figure(SHARES)
    softmax, eco = figure.axes
    assert (softmax.get_title(loc="left"), eco.get_title(loc="left")) == ("Softmax", "EcoFormer")
    heights = [[bar.get_height() for bar in bars] for bars in softmax.containers]
    assert [sum(column) for column in zip(*heights, strict=True)] == pytest.approx([100, 100, 100])
    assert heights[0][0] == pytest.approx(100 * 3 / 4.1)
    assert {"73%", "24%", "4.1 mJ", "6.1 mJ"} <= set(texts(softmax))
    assert [label.get_text() for label in softmax.get_xticklabels()] == ["PVTv2-B0", "PVTv2-B1", "PVTv2-B2"]
    assert "energy" in softmax.get_ylabel()


def test_sweep_has_a_line_a_mechanism():
    figure = sweep_figure(SWEEP)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert names(figure) == ["Softmax", "EcoFormer", "Performer", "Linformer"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([n**4 * 1e-9 for n in (224, 448, 896)])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Resolution (pixels a side)", "Energy (mJ)")


def test_accuracy_has_a_point_a_row():
    figure = accuracy_figure(POINTS)
    assert names(figure) == ["Transformer", "EcoFormer", "Linformer"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == pytest.approx([9.25, 2.49, 2.6])


def test_bars_are_where_time_and_energy_go():
    total = simulate_layer("eco")
    time, energy = bitfusion_figure({"Eco": total, "Softmax": simulate_layer("softmax")}).axes
    widths = [container[0].get_width() for container in time.containers]
    assert sum(widths) == pytest.approx(total.latency_s)
    assert widths[1] / sum(widths) == pytest.approx(total.stall_cycles / total.cycles)
    joules = [container[0].get_width() for container in energy.containers]
    assert joules == pytest.approx(
        [x * 1e-9 for x in (total.energy.core, total.energy.buffers, total.energy.dram)]
    )
    assert "8.5 ms" in texts(time)
    (divided, _) = bitfusion_figure({"Eco": total}, divide_by=16).axes
    assert sum(container[0].get_width() for container in divided.containers) == pytest.approx(
        sum(widths) / 16
    )


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_files_by_suffix_and_the_same_twice(tmp_path, suffix, start):
    settings = dict(matplotlib.rcParams)
    first, second = (save(sweep_figure(SWEEP), tmp_path / f"{i}{suffix}").read_bytes() for i in range(2))
    assert first.startswith(start)
    assert first == second
    assert dict(matplotlib.rcParams) == settings


def test_targets_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jpg must end in \.png, \.svg, \.pdf, got '\.jpg'"):
        check_target("a.jpg")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        check_target(tmp_path / "nowhere" / "a.png")


def test_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"^figures need matplotlib: pip install 'ecoformer\[figures\]'$"):
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


def test_names_and_colours_are_the_same_everywhere():
    assert [readable(n) for n in ("pvt_v2_b0", "eco", "performer", "My-Net")] == [
        "PVTv2-B0",
        "EcoFormer",
        "Performer",
        "My-Net",
    ]
    assert colour_of("eco", 0) == colour_of("eco", 3) == colour_of("EcoFormer", 1)
    assert colour_of("transformer", 0) == colour_of("softmax", 1)
