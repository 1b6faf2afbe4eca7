import html
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ecoformer.report.page import accuracy_note, read_run, table_rows, write_page


def make_run(folder, mechanism="eco", accuracy=0.9, energy=2e6):
    folder.mkdir(parents=True)
    values = {"mul": 1_500_000, "add": 2_500_000, "energy_pj": energy}
    recipe = {
        "about": "<b>bold</b>",
        "data": {"name": "digits"},
        "model": {"name": "pvt_v2_b0"},
        "attention": {"name": mechanism},
        "optimiser": {"lr": 1e-3},
        "schedule": {"epochs": 2},
        "batch": 8,
    }
    result = {"recipe": recipe, "accuracy": accuracy, "cost": {"paper": values, "exact": values}}
    result |= {"steps": 10, "seconds": 3.0, "hardware": "a CPU", "versions": {"torch": "2"}}
    (folder / "result.json").write_text(json.dumps(result))
    lines = [{"step": 5, "split": "train", "loss": 1.0}, {"step": 10, "split": "test", "accuracy": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Balanced(HTMLParser):
    """Fails on a tag that is closed without having been opened."""

    VOID = ("meta", "br", "path", "use", "rect", "image")

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_run_is_read_back(tmp_path):
    run = read_run(make_run(tmp_path / "first"))
    assert (run.name, run.mechanism, run.accuracy) == ("first", "eco", 0.9)
    assert run.energy_mj() == pytest.approx(2e-3)
    assert [m["step"] for m in run.metrics] == [5, 10]


def test_folders_without_a_run_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing holds no finished run: there is no result\.json"):
        read_run(tmp_path / "nothing")
    folder = make_run(tmp_path / "odd")
    (folder / "result.json").write_text('{"accuracy": 1}')
    with pytest.raises(ValueError, match="odd holds no run of ecoformer train: KeyError"):
        read_run(folder)


def test_energy_is_in_millijoules(tmp_path):
    small, large = (read_run(make_run(tmp_path / n, energy=e)) for n, e in (("a", 2.5e6), ("b", 3.214e9)))
    rows = table_rows([small, large])
    assert [row["energy (paper)"] for row in rows] == ["0.0025 mJ", "3.21 mJ"]


def test_the_number_of_test_samples_says_what_they_resolve(tmp_path):
    def run(name, samples):
        found = read_run(make_run(tmp_path / name, accuracy=0.5))
        return replace(found, result=found.result | {"test_samples": samples})

    assert "20,000 test samples" in accuracy_note([run("a", 20_000)])
    assert "1.0 points" in accuracy_note([run("b", 20_000), run("c", 20_000)])
    assert "from 5 to 20,000" in accuracy_note([run("d", 20_000), run("e", 5)])


def test_a_page_is_well_formed_and_stands_alone(tmp_path):
    runs = [read_run(make_run(tmp_path / name, name, a)) for name, a in (("softmax", 0.91), ("eco", 0.9))]
    page = tmp_path / "new" / "page.html"
    write_page(page, "A <title>", "Lead & more", runs, table_rows(runs), notes=["note"])
    text = page.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert text.count("<svg") == 2
    shown = "".join(parser.texts)
    for words in ("A <title>", "Lead & more", "<b>bold</b>", "91.00%", "note"):
        assert words in shown
    for outside in ("src=", "@import", "url(http", "<script", "<link"):
        assert outside not in text


def test_pages_are_html_files(tmp_path):
    with pytest.raises(ValueError, match=r"page\.pdf"):
        write_page(tmp_path / "page.pdf", "title", "lead", [], [])


@pytest.mark.parametrize("name", ["$x$", "$\\frac$", "a $ b", "50% <of> $5$ & _x^"])
def test_names_are_not_taken_for_formulas(name, tmp_path):
    run = read_run(make_run(tmp_path / name))
    write_page(tmp_path / "page.html", "Runs", "lead", [run], table_rows([run]))
    assert html.escape(name) in (tmp_path / "page.html").read_text()
