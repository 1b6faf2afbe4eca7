import json
from pathlib import Path

import pytest
from test_page import make_run
from typer.testing import CliRunner

from ecoformer.cli import app
from ecoformer.report import demo


@pytest.fixture
def demo_run(monkeypatch, tmp_path):
    def run_demo(out, *, margin, changes, progress, show):
        progress("1. training")
        return demo.Demo(
            [{"model": "eco", "accuracy": "90%"}], Path(out) / "index.html", 0.02, 0.4, margin, 0.8
        )

    monkeypatch.setattr(demo, "run_demo", run_demo)


def test_the_exit_status_says_whether_accuracy_was_kept(demo_run, tmp_path):
    lost = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--margin", "0.01"])
    assert lost.exit_code == 1
    assert "1. training" in lost.output
    assert "not kept: 2.00% less" in lost.output
    kept = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--margin", "0.03"])
    assert kept.exit_code == 0


def test_demo_gives_json_alone(demo_run, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json"])
    facts = json.loads(result.output)
    assert facts["kept"] is False
    assert facts["lost"] == 0.02
    assert facts["page"] == str(tmp_path / "index.html")


def test_report_writes_a_page(tmp_path):
    runs = [str(make_run(tmp_path / name, name, a)) for name, a in (("softmax", 0.91), ("eco", 0.9))]
    page = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["report", *runs, "--out", str(page), "--title", "Two"])
    assert result.exit_code == 0
    text = page.read_text()
    assert "softmax has the highest accuracy, 91.00%" in text
    assert "<title>Two</title>" in text
