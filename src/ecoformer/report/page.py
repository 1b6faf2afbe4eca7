"""An HTML page about runs of `ecoformer train`: a table, figures and recipes, all in one file."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.files import replace_text
from ecoformer.report.figures import accuracy_figure, drawing, new_figure
from ecoformer.training import Recipe, as_yaml
from ecoformer.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, str]]
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.lead { font-size: 1.1rem; } .quiet { opacity: 0.7; font-size: 0.9rem; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td { border-bottom: 1px solid #8886; }
th, td { padding: 0.4rem 0.5rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; padding: 0.8rem; background: #fff; color: #444; border-radius: 6px; }
figure svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; background: #8882; padding: 0.8rem; border-radius: 6px; }
"""


@dataclass(frozen=True)
class Run:
    """A finished run: its name, `result.json`, and the lines of `metrics.jsonl`."""

    name: str
    result: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def mechanism(self) -> str:
        """The attention mechanism."""
        return str(self.result["recipe"]["attention"]["name"])

    @property
    def accuracy(self) -> float:
        """On the test data, 0 to 1."""
        return float(self.result["accuracy"])

    def cost(self, accounting: str = "paper") -> dict[str, float]:
        """Multiplications, additions and energy of a sample."""
        return dict(self.result["cost"][accounting])


def read_run(path: str | Path) -> Run:
    """Read the finished run in a folder."""
    folder = RunFolder(path)
    try:
        result = json.loads(folder.result_file.read_text(encoding="utf-8"))
        lines = folder.metrics_file.read_text(encoding="utf-8").splitlines()
        run = Run(folder.path.name, result, [json.loads(line) for line in lines])
        run.mechanism, run.accuracy, run.cost()["energy_pj"]
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise FileNotFoundError(f"{path} holds no finished run: there is no {missing}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"{path} holds no run of ecoformer train: {reason}") from error
    return run


def table_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One row for each run: accuracy, and operations and energy of one sample."""
    rows = []
    for run in runs:
        paper, exact = run.cost("paper"), run.cost("exact")
        rows.append(
            {
                "model": run.name,
                "accuracy": f"{run.accuracy:.2%}",
                "multiplications": f"{paper['mul'] / 1e6:,.1f} M",
                "additions": f"{paper['add'] / 1e6:,.1f} M",
                "energy (paper)": _joules(paper["energy_pj"]),
                "energy (exact)": _joules(exact["energy_pj"]),
            }
        )
    return rows


def _joules(picojoules: float) -> str:
    return f"{picojoules / 1e6:,.1f} µJ" if picojoules < 1e9 else f"{picojoules / 1e9:,.2f} mJ"


def write_page(
    path: str | Path, title: str, lead: str, runs: Sequence[Run], rows: Rows, note: str = ""
) -> None:
    """Write the page; its folder is created if need be."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"a page is an .html file, got {target.name}")
    points = [{"label": r.name, "energy_pj": r.cost()["energy_pj"], "accuracy": r.accuracy} for r in runs]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    parts = [
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>',
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="lead">{html.escape(lead)}</p>',
        _table(rows),
        f'<p class="quiet">{html.escape(note)}</p>',
        "<h2>Figures</h2>",
        _figure(accuracy_figure(points), "Test accuracy against energy per sample, paper accounting."),
        _figure(_curves(runs), "Training loss and test accuracy over the steps of each run."),
        "<h2>Recipes</h2>",
        *map(_recipe, runs),
        "</body></html>\n",
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, "\n".join(parts))


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row.values()) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _curves(runs: Sequence[Run]) -> Figure:
    """Training loss and test accuracy, one line for each run."""
    with drawing():
        figure = new_figure(7.6, 3.2)
        panels = figure.subplots(1, 2)
        wanted = (("train", "loss", "Training loss", 1.0), ("test", "accuracy", "Test accuracy (%)", 100.0))
        for axes, (split, name, label, factor) in zip(panels, wanted, strict=True):
            for run in runs:
                own = [m for m in run.metrics if m.get("split") == split and name in m]
                axes.plot([m["step"] for m in own], [factor * m[name] for m in own], ".-", label=run.name)
            axes.set(xlabel="Step", ylabel=label)
            axes.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _figure(figure: Figure, caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _recipe(run: Run) -> str:
    recipe, result = as_yaml(Recipe.model_validate(run.result["recipe"])), run.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    facts = f"{result['steps']:,} steps in {result['seconds']:.0f} s on {result['hardware']}; {versions}"
    return (
        f"<details><summary>{html.escape(run.name)}: {html.escape(facts)}</summary>"
        f"<pre>{html.escape(recipe)}</pre></details>"
    )
