"""Pictures: what they show, how they are written, and what they refuse."""

from __future__ import annotations

import builtins
import json

import matplotlib
import pytest

from ecoformer.bitfusion import attention_layer, simulate_all
from ecoformer.report.figures import accuracy_figure, bitfusion_figure, shares_figure, sweep_figure
from ecoformer.report.rows import accuracy_rows, file_rows, printed_rows
from ecoformer.report.style import check_target, colour_of, readable, save

SHARES = [
    {"model": f"pvt_v2_b{i}", "mechanism": name, "attention": 3e9, "ffn": (1 + i) * 1e9, "other": 0.1e9}
    for name in ("softmax", "eco")
    for i in range(3)
]
SWEEP = [
    {"mechanism": name, "value": n, "energy_pj": factor * n**power, "mul": n, "add": n}
    for name, power, factor in [
        ("softmax", 4, 1),
        ("eco", 2, 2),
        ("performer", 2, 2.1),
        ("linformer", 2, 2.2),
    ]
    for n in (224, 448, 896)
]
POINTS = [
    {"label": "transformer", "energy_pj": 9.25e9, "accuracy": 71.44},
    {"label": "eco", "energy_pj": 2.49e9, "accuracy": 71.23},
    {"label": "linformer", "energy_pj": 2.6e9, "accuracy": 71.22},
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
    assert {"73%", "24%", "4.10 mJ", "6.10 mJ"} <= set(texts(softmax))
    assert [label.get_text() for label in softmax.get_xticklabels()] == ["PVTv2-B0", "PVTv2-B1", "PVTv2-B2"]
    assert "energy" in softmax.get_ylabel()


def test_sweep_has_a_line_a_mechanism_the_highest_first():
    figure = sweep_figure(SWEEP)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert names(figure) == ["Softmax", "Linformer", "Performer", "EcoFormer"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([n**4 * 1e-9 for n in (224, 448, 896)])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Resolution (pixels a side)", "Energy (mJ)")


def test_a_short_range_is_drawn_on_a_linear_axis():
    rows = [{"mechanism": "eco", "value": n, "energy_pj": 1e9 + n} for n in (4, 8, 16)]
    assert sweep_figure(rows, "bits").axes[0].get_yscale() == "linear"


def test_accuracy_has_a_point_a_row():
    figure = accuracy_figure(POINTS)
    assert names(figure) == ["Transformer", "EcoFormer", "Linformer"]
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == pytest.approx([9.25, 2.49, 2.6])


def test_bars_are_where_time_and_energy_go():
    total = simulate_all(attention_layer("eco"))
    time, energy = bitfusion_figure({"Eco": total, "Softmax": simulate_all(attention_layer("softmax"))}).axes
    widths = [container[0].get_width() for container in time.containers]
    assert sum(widths) == pytest.approx(total.latency_s * 1e3)
    assert widths[1] / sum(widths) == pytest.approx(total.stall_cycles / total.cycles)
    joules = [container[0].get_width() for container in energy.containers]
    assert joules == pytest.approx(
        [total.energy.core / 1e6, total.energy.buffers / 1e6, total.energy.dram / 1e6]
    )
    assert (time.get_xlabel(), energy.get_xlabel()) == ("Time (ms)", "Energy (mJ)")
    (divided, _) = bitfusion_figure({"Eco": total}, divide_by=16).axes
    assert divided.get_xlabel() == "Time (µs)"


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
    row = {"mechanism": "eco", "energy": 2e9, "accuracy": 0.71, "more": 1}
    for i, content in enumerate((row, [row], {"rows": [row]}, {"command": "x", "figures": [row]})):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(content))
        found = accuracy_rows(file_rows(path), path.name)
        assert found == [{"label": "eco", "energy_pj": 2e9, "accuracy": 71.0}]
    table = tmp_path / "a.csv"
    table.write_text("method,energy_bpj,top1\neco,2.49,71.23\n")
    assert accuracy_rows(file_rows(table), "a.csv") == [
        {"label": "eco", "energy_pj": pytest.approx(2.49e9), "accuracy": 71.23}
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("3", "must hold an object or a list of objects"),
        ("[]", "must hold an object or a list of objects"),
        (
            '[{"label": "a", "accuracy": 3}]',
            "row 0 of r.json lacks energy_pj or energy or energy_bpj; it has",
        ),
        ('[{"label": "a", "energy": 3}]', "lacks accuracy or top1"),
        ('[{"energy": 3, "accuracy": 1}]', "lacks label or mechanism or method"),
        ('[{"label": "a", "energy": "x", "accuracy": 1}]', "energy must be a finite number from 0, got 'x'"),
        ('[{"label": "a", "energy": -1, "accuracy": 1}]', "energy must be a finite number from 0, got -1"),
    ],
)
def test_result_files_that_will_not_do(tmp_path, content, words):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        accuracy_rows(file_rows(path), path.name)


def test_printed_rows_are_the_papers():
    rows = accuracy_rows(printed_rows("cifar100_attentions"), "print")
    assert len(rows) == 5
    assert rows[-1] == {"label": "eco", "energy_pj": pytest.approx(2.49e9), "accuracy": 71.23}
    with pytest.raises(
        ValueError, match="the paper has no table 'nope': there are attention_only, bitfusion"
    ):
        printed_rows("nope")


def test_names_and_colours_are_the_same_everywhere():
    assert [readable(n) for n in ("pvt_v2_b0", "eco", "performer", "My-Net")] == [
        "PVTv2-B0",
        "EcoFormer",
        "Performer",
        "My-Net",
    ]
    assert colour_of("eco", 0) == colour_of("eco", 3) == colour_of("EcoFormer", 1)
    assert colour_of("transformer", 0) == colour_of("softmax", 1)
