"""Every command's output fits in 80 columns, with nothing cut."""

import pytest

from ecoformer.report.tables import paper_table


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("train",),
        ("info",),
        ("info", "ours.safetensors"),
        ("convert", "ours.safetensors", "out.safetensors"),
        ("plan", "ours.safetensors", "--no-measure"),
        ("cost", "ours.safetensors", "--accounting", "exact"),
        ("cost", "ours.safetensors", "--on", "bitfusion"),
        ("cost", "ours.safetensors", "--compare", "softmax,eco", "--sweep", "resolution=32,64"),
    ],
    ids=" ".join,
)
def test_output_fits(cli, command):
    status, out, _ = cli(*command, columns=80)
    assert status == 0
    assert out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("name", ["long_range_arena", "throughput"])
def test_no_figure_of_a_table_is_cut(run, name):
    out = run("tables", name, columns=80)[1]
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out
    words = out.split()
    for cell in paper_table(name).cells:
        assert cell.text in words
