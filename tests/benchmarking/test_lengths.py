"""Where eco overtakes SDPA, and the plot."""

from dataclasses import replace

import pytest
import torch

from ecoformer.attention import EcoAttention
from ecoformer.benchmarking import attention
from ecoformer.benchmarking.attention import Setting, crossover_sentence, find_crossover, plot_lengths
from ecoformer.benchmarking.measuring import Bench
from ecoformer.benchmarking.results import Row, Run, Timing, set_ratios

CPU = torch.device("cpu")
SMALL = Setting((2, 2, 70, 8), torch.float32, CPU)
QUICK = Bench(CPU, 0.001)


@pytest.fixture
def simulated(monkeypatch):
    """Times as formulas: SDPA takes N², eco a multiple of N."""
    tried = []

    def use(meeting, slow=(), quiet=True):
        def fake(settings, mechanisms, bench):
            assert not bench.memory
            n = settings[0].shape[2]
            tried.append(n)
            times = {"softmax": n * n, "eco": n * meeting + (1e6 if n in slow else 0)}
            rows = [Row(name, "eager", {}, timing=Timing(t, t, t, 1)) for name, t in times.items()]
            set_ratios(rows)
            return Run("", 1, rows, quiet=quiet)

        monkeypatch.setattr(attention, "bench_attention", fake)
        return tried

    return use


@pytest.mark.parametrize("meeting", [100, 1000, 5000.5])
def test_crossover(simulated, meeting):
    tried = simulated(meeting)
    found = find_crossover(SMALL, QUICK)
    assert found["slower_at"] <= meeting < found["tokens"] <= 1.1 * found["slower_at"] + 1
    assert found["ratios"][found["tokens"]] > 1 >= found["ratios"][found["slower_at"]]
    assert found["backend"] == "eager"
    assert len(tried) == len(set(tried)) < 20
    assert f"between N = {found['slower_at']:,} and {found['tokens']:,}" in crossover_sentence(found)


def test_crossover_at_the_ends(simulated):
    simulated(2, quiet=False)
    found = find_crossover(SMALL, QUICK)
    assert (found["tokens"], found["slower_at"], found["quiet"]) == (16, None, False)
    assert "busy" in crossover_sentence(found)
    tried = simulated(1e9)
    found = find_crossover(SMALL, QUICK, longest=100)
    assert found["tokens"] is found["backend"] is None
    assert max(tried) == 100
    assert "up to N = 100" in crossover_sentence(found)
    simulated(90)
    found = find_crossover(SMALL, QUICK, longest=100)
    assert found["slower_at"] <= 90 < found["tokens"] <= 100


def test_crossover_of_what_wins_and_loses_again(simulated):
    """As where another kernel takes over from some length on."""
    simulated(15, slow=(32,))
    found = find_crossover(SMALL, QUICK)
    assert found["ratios"][16] > 1
    assert 32 <= found["slower_at"] < found["tokens"] <= 64
    simulated(15)
    assert find_crossover(SMALL, QUICK)["tokens"] == 16


def test_crossover_of_wrong_results(monkeypatch):
    monkeypatch.setattr(EcoAttention, "attend", lambda self, q, k, v, mask, is_causal: v + q.float() * 0)
    with pytest.raises(
        RuntimeError, match=r"nothing to compare at \(2, 2, 16, 8\): eco \(eager\): wrong result"
    ):
        find_crossover(SMALL, QUICK)


def test_plot(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure,
        "savefig",
        lambda figure, *args, **how: drawn.append(figure) or save(figure, *args, **how),
    )
    rows = []
    for n in (128, 64):
        setting = {"shape": [1, 2, n, 8], "dtype": "float32", "backward": False, "causal": False}
        for index, name in enumerate(("softmax", "eco")):
            ms = float(n * (index + 1))
            rows.append(Row(name, "eager", setting, timing=Timing(ms, ms, ms, 1), peak_mb=ms))
        rows.append(Row("reformer", "eager", setting, failure="out of memory"))
    plot_lengths(Run("a machine", 1, rows), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for axes in drawn[0].axes:
        assert [line.get_label() for line in axes.lines] == ["softmax (eager)", "eco (eager)"]
        assert list(axes.lines[1].get_xdata()) == [64, 128]
        assert list(axes.lines[1].get_ydata()) == [128, 256]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    failed = Run("a machine", 1, [replace(rows[0], timing=None)])
    with pytest.raises(ValueError, match="every contestant failed"):
        plot_lengths(failed, tmp_path / "b.png")
