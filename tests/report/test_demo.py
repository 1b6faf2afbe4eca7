import json

import pytest

from ecoformer.report.demo import Demo, run_demo

TINY = (
    "augment.size=32",
    "schedule.epochs=1",
    "schedule.warmup=0",
    "data.options.limit=32",
    "batch=16",
    "hashing.samples=8",
    "model.options.embed_dims=[8, 8, 8, 16]",
    "model.options.num_heads=[1, 1, 1, 1]",
)


def run(out, **options):
    lines = []
    return run_demo(out, changes=TINY, progress=lines.append, show=False, **options), lines


def test_both_models_are_trained_and_compared_once(tmp_path, monkeypatch):
    monkeypatch.setattr("ecoformer.report.demo.LATENCY_SECONDS", 0.01)
    monkeypatch.setattr("ecoformer.report.demo.FINE_TUNING", ("schedule.epochs=1", "teacher.weight=0.5"))
    folder = tmp_path
    result, lines = run(folder, margin=1.0)
    assert [row["model"] for row in result.rows] == ["softmax", "eco"]
    results = [json.loads((folder / name / "result.json").read_text()) for name in ("softmax", "eco")]
    assert result.lost == pytest.approx(results[0]["accuracy"] - results[1]["accuracy"])
    energies = [found["cost"]["paper"]["energy_pj"] for found in results]
    assert result.saved == pytest.approx(1 - energies[1] / energies[0])
    assert results[1]["recipe"]["start"] == str(folder / "softmax" / "model.safetensors")
    assert results[1]["recipe"]["teacher"]["checkpoint"] == results[1]["recipe"]["start"]
    assert all("latency of 16" in row for row in result.rows)
    assert len([line for line in lines if line[0].isdigit()]) == 3
    assert result.page.read_text().count("<svg") == 2
    files = [folder / name / "model.safetensors" for name in ("softmax", "eco")]
    before = [file.stat().st_mtime_ns for file in files]
    again, _ = run(folder, margin=1.0)
    assert again.lost == result.lost
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize(
    ("lost", "kept", "words"),
    [
        (0.02, False, "not kept: 2.00% less than softmax"),
        (0.01, True, "kept: 1.00% less"),
        (0.0, True, "kept: equal to softmax"),
        (-0.01, True, "kept: 1.00% more than softmax"),
    ],
)
def test_the_verdict(tmp_path, lost, kept, words):
    demo = Demo([], tmp_path, lost, 0.4, 0.01, 0.9)
    assert demo.kept is kept
    assert words in str(demo)
    assert "40% of the energy saved" in str(demo)
