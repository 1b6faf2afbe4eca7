from test_page import make_run
from typer.testing import CliRunner

from ecoformer.cli import app


def test_report_writes_a_page(tmp_path):
    runs = [str(make_run(tmp_path / name, name, a)) for name, a in (("softmax", 0.91), ("eco", 0.9))]
    page = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["report", *runs, "--out", str(page), "--title", "Two"])
    assert result.exit_code == 0
    text = page.read_text()
    assert "softmax has the highest accuracy, 91.00%" in text
    assert "<title>Two</title>" in text
    assert "<script" not in text


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    runs = [str(make_run(tmp_path / place / "eco")) for place in ("first", "second")]
    page = tmp_path / "out.html"
    assert CliRunner().invoke(app, ["report", *runs, "--out", str(page)]).exit_code == 0
    assert all(f"<td>{name}</td>" in page.read_text() for name in ("first/eco", "second/eco"))
