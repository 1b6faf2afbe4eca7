"""The tables of pages are what the result files give."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import result_tables  # noqa: E402


@pytest.mark.parametrize("page", result_tables.PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    text = page.read_text()
    assert "<!-- table: " in text
    assert result_tables.filled(text) == text, "run benchmarks/result_tables.py"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text() for page in result_tables.PAGES)
    assert all(f"<!-- table: {name} -->" in text for name in result_tables.TABLES)


def test_a_number_that_was_edited_is_noticed():
    text = (ROOT / "docs" / "results.md").read_text()
    edited = text.replace("| 67.83 %", "| 69.83 %", 1)
    assert edited != text
    assert result_tables.filled(edited) == text
