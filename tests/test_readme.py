"""The documents do what they say: snippets run, figures are those of the result files."""

import json
import re
from pathlib import Path

import pytest

from ecoformer.attention.registry import _REGISTRY

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "conversion.md"]
DOCUMENTS += [ROOT / "docs" / f"{name}.md" for name in ("bitfusion", "cost", "data", "training")]


def figures(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_run(document, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    known = dict(_REGISTRY)
    namespace = {}
    try:
        for block in blocks:
            exec(compile(block, document.name, "exec"), namespace)
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(known)


def test_sentence_encoder_table_is_the_measured_one():
    page = (ROOT / "docs" / "conversion.md").read_text()
    measured = figures("minilm")
    names = ("spearman", "same nearest", "same ten nearest", "cosine to the original")
    assert f"embeddings of {measured['test']:,} captions" in page
    for variant, runs in measured["variants"].items():
        for stage, (run,) in runs["stages"].items():
            numbers = " | ".join(f"{run[name]:.3f}" for name in names)
            assert f"| {variant} | {stage} | {numbers} |" in page


def test_memory_of_a_million_tokens_is_the_measured_one():
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    measured = figures("million_tokens")
    full, causal = (measured[order]["peak_rss_mb"] / 1024 for order in ("full", "causal"))
    assert f"in {full:.1f} GB on a CPU, in causal order in {causal:.1f} GB" in readme


@pytest.mark.parametrize(
    "document", sorted({*DOCUMENTS, *(ROOT / "docs").glob("*.md")}), ids=lambda path: path.name
)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target
