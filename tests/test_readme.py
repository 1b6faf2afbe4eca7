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


def test_quality_tables_are_the_measured_ones():
    report = (ROOT / "docs" / "hashing.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for tokens in figures("hash_quality"):
        assert all(tokens["ahead"].values())
        for row in tokens["rows"]:
            objective, recall, correlation = (
                f"{row[key]:.3f} ± {row[key + '_std']:.3f}" for key in ("objective", "recall", "correlation")
            )
            assert f"| {row['method']} | {objective} | {recall} | {correlation} |" in report
            if tokens["tokens"] in ("image patches", "text bytes") and row["method"] in (
                "KLSH",
                "LSH",
                "sign",
            ):
                assert f"{objective} | {recall} |" in readme


def test_speed_table_is_the_measured_one():
    report = (ROOT / "docs" / "hashing.md").read_text()
    measured = figures("fit_speed")
    for row in measured["rows"]:
        assert row["bits_that_agree"] > 0.999
        for seconds in row["seconds"].values():
            assert f"{seconds:.2f} s" in report
    assert f"{measured['long']['seconds']:.1f} s, {measured['long']['peak_rss_mb']:.0f} MB" in report


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
