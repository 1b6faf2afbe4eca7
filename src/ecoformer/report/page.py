"""One HTML page on runs: a table, pictures, and how they were made; nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecoformer.report.curves import curves_figure
from ecoformer.report.figures import accuracy_figure
from ecoformer.report.runs import Run

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #ddd; --page: #fff; --quiet: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --faint: #444; --page: #181818; --quiet: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.3rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.lead { font-size: 1.1rem; } .quiet { color: var(--quiet); font-size: 0.9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.4rem 0.5rem; text-align: right; white-space: nowrap; }
td { border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--ink); }
figure { margin: 1rem 0; padding: 0.8rem; background: #fff; border-radius: 6px; }
figure svg { max-width: 100%; height: auto; } figcaption { color: #444; font-size: 0.9rem; }
details { margin-top: 1rem; }
pre { overflow-x: auto; background: #8882; padding: 0.8rem; border-radius: 6px; }
"""


def table_rows(
    runs: Sequence[Run], extra: Mapping[str, Mapping[str, str]] | None = None
) -> list[dict[str, str]]:
    """The table of a page: one row a run, energy and operations of one sample beside its accuracy."""
    rows = []
    for run in runs:
        paper, exact = run.cost("paper"), run.cost("exact")
        row = {
            "model": run.name,
            "accuracy": f"{run.accuracy:.2%}",
            "multiplications": _millions(paper["mul"]),
            "additions": _millions(paper["add"]),
            "energy (paper)": _joules(paper["energy_pj"]),
            "energy (exact)": _joules(exact["energy_pj"]),
        }
        rows.append(row | dict((extra or {}).get(run.name, {})))
    return rows


def render(
    title: str,
    lead: str,
    runs: Sequence[Run],
    rows: Sequence[Mapping[str, str]],
    *,
    notes: Sequence[str] = (),
) -> str:
    """The page as HTML."""
    points = [
        {"label": r.name, "energy_pj": r.cost()["energy_pj"], "accuracy": 100 * r.accuracy} for r in runs
    ]
    pictures = [
        (
            accuracy_figure(points),
            "Test accuracy against the energy of one sample, by the paper's accounting.",
        ),
        (curves_figure(runs), "Training loss and test accuracy over the steps of each run."),
    ]
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="lead">{html.escape(lead)}</p>', _table(rows)]
    body += [f'<p class="quiet">{html.escape(note)}</p>' for note in notes]
    body += ["<h2>Pictures</h2>", *(_picture(drawn, caption) for drawn, caption in pictures)]
    body += ["<h2>How it was made</h2>", *(_making(run) for run in runs)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_page(path: str | Path, text: str) -> Path:
    """Write a page; its folder is made if need be."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"a page is an .html file, got {target.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names) + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _picture(drawn: Any, caption: str) -> str:
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _making(run: Run) -> str:
    from ecoformer.training import Recipe, as_yaml

    recipe = as_yaml(Recipe.model_validate(run.result["recipe"]))
    versions = ", ".join(f"{name} {version}" for name, version in run.result["versions"].items())
    result = run.result
    facts = f"{result['steps']:,} steps in {result['seconds']:.0f} s on {result['hardware']}; {versions}"
    return (
        f"<details><summary>{html.escape(run.name)}: {html.escape(facts)}</summary>"
        f"<pre>{html.escape(recipe)}</pre></details>"
    )


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M"


def _joules(picojoules: float) -> str:
    return f"{picojoules / 1e6:,.1f} µJ" if picojoules < 1e9 else f"{picojoules / 1e9:,.2f} mJ"
