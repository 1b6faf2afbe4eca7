"""The documents do what they say: snippets run, links lead somewhere, tables are those of result files."""

import re
from pathlib import Path

import pytest

import ecoformer
from ecoformer.attention.registry import _REGISTRY

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
SNIPPET = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
WITH_SNIPPETS = [document for document in DOCUMENTS if SNIPPET.search(document.read_text())]


@pytest.mark.parametrize("document", WITH_SNIPPETS, ids=lambda path: path.name)
def test_snippets_run(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = dict(_REGISTRY)
    namespace = {}
    try:
        for block in SNIPPET.findall(document.read_text()):
            exec(compile(block, document.name, "exec"), namespace)
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(known)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"`((?:results|examples)/[\w/]+\.\w+)`", text):
        assert (ROOT / target).exists(), target


def test_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    paths = [path.rpartition(".") for path in re.findall(r"^::: (ecoformer\.[\w.]+)$", text, re.MULTILINE)]
    more = [name for package, _, name in paths if package in ("ecoformer.attention", "ecoformer.conversion")]
    assert sorted(name for _, _, name in paths) == sorted([*ecoformer.__all__, *more])
    public = {*ecoformer.attention.__all__, *ecoformer.conversion.__all__}
    assert public.issuperset(more)
    mechanisms = {name for name in ecoformer.attention.__all__ if name.endswith("Attention")}
    assert mechanisms - {"HashedAttention", "SoftmaxAttention"} <= {name for _, _, name in paths}


def test_tables_are_those_of_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    for page in tables.PAGES:
        text = page.read_text()
        assert tables.filled(text) == text, f"{page.name}: run benchmarks/tables.py"
        edited = text.replace("<!-- end of table -->", "| 1 |\n<!-- end of table -->")
        assert tables.filled(edited) == text
