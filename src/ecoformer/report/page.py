"""An HTML page about runs of `ecoformer train`, all in one file.

It has a table, figures and recipes; and, for models that were shown a picture, their answers, codes and
attention, which `page.js` draws.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecoformer.files import replace_text
from ecoformer.report.figures import accuracy_figure, drawing, new_figure
from ecoformer.training import Recipe, as_yaml
from ecoformer.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from ecoformer.report.inside import Sample

Rows = Sequence[Mapping[str, str]]
_INK = "#010203"
"""Stands for the colour of the page's text until a figure is embedded."""


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

    def energy_mj(self, accounting: str = "paper") -> float:
        """Millijoules of one sample."""
        return float(self.result["cost"][accounting]["energy_pj"]) * 1e-9

    @property
    def test_samples(self) -> int | None:
        """Number of test samples; None for runs of older versions."""
        return self.result.get("test_samples")


def read_run(path: str | Path) -> Run:
    """Read the finished run in a folder."""
    folder = RunFolder(path)
    try:
        result = json.loads(folder.result_file.read_text(encoding="utf-8"))
        lines = folder.metrics_file.read_text(encoding="utf-8").splitlines()
        run = Run(folder.path.name, result, [json.loads(line) for line in lines])
        run.mechanism, run.accuracy, run.energy_mj("paper"), run.energy_mj("exact")
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise FileNotFoundError(f"{path} holds no finished run: there is no {missing}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"{path} holds no run of ecoformer train: {reason}") from error
    return run


def table_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One row for each run: accuracy, and energy of one sample by both accountings."""
    return [
        {
            "model": run.name,
            "accuracy": f"{run.accuracy:.2%}",
            "energy (paper)": f"{run.energy_mj('paper'):.3g} mJ",
            "energy (exact)": f"{run.energy_mj('exact'):.3g} mJ",
        }
        for run in runs
    ]


def accuracy_note(runs: Sequence[Run]) -> str:
    """How many samples the runs were tested on, and the smallest difference that they resolve."""
    counts = {run.test_samples for run in runs}
    if None in counts:
        return "Runs of older versions do not say how many test samples they have."
    if len(counts) > 1:
        return f"Accuracy: from {min(counts):,} to {max(counts):,} test samples."  # type: ignore[type-var]
    (count,) = counts
    variance = max(run.accuracy * (1 - run.accuracy) for run in runs) / (count or 1)
    return (
        f"Accuracy: {count:,} test samples. The smallest difference between two models that they resolve is "
        f"{200 * (2 * variance) ** 0.5:.1f} points: two standard errors, if a sample has one answer."
    )


def write_page(
    path: str | Path,
    title: str,
    lead: str,
    runs: Sequence[Run],
    rows: Rows,
    *,
    notes: Sequence[str] = (),
    sample: Sample | None = None,
    times: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the page; its folder is created if need be.

    Args:
        path: the page, an .html file.
        title: of the page.
        lead: the first paragraph.
        runs: what is compared.
        rows: of the table.
        notes: paragraphs below the table.
        sample: what the models do with one picture.
        times: rows of name, tokens and ms.
    """
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"a page is an .html file, got {target.name}")
    files = resources.files("ecoformer.report")
    style, script = ((files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{html.escape(title)}</title><style>{style}</style>"
    points = [{"label": r.name, "energy_pj": r.energy_mj() * 1e9, "accuracy": r.accuracy} for r in runs]
    charts = [_figure(accuracy_figure(points), "Accuracy over energy per sample, paper accounting.")]
    if times:
        charts.append(_figure(_times(times), "Time per sample over tokens, measured on this machine."))
    charts.append(_figure(_curves(runs), "Accuracy on the test data over training steps."))
    parts = [
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>',
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="lead">{html.escape(lead)}</p>',
        _table(rows),
        *(f'<p class="quiet">{html.escape(note)}</p>' for note in notes),
        *(_inside(sample) if sample is not None and any(sample.layers.values()) else ()),
        f'<h2>Accuracy, energy and time</h2>\n<div class="charts">{"".join(charts)}</div>',
        "<h2>Recipes</h2>",
        *map(_recipe, runs),
        f"<script>{script}</script>" if sample is not None and any(sample.layers.values()) else "",
        "</body></html>\n",
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, "\n".join(parts))


def _table(rows: Rows) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in rows[0])
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row.values()) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Results">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _inside(sample: Sample) -> list[str]:
    """The input with answers, attention and codes, and the data that the script draws them from."""
    drawn = [name for name, layers in sample.layers.items() if layers]
    hashed = [name for name in drawn if sample.layers[name][0].codes is not None]
    depths = max(len(sample.layers[name]) for name in drawn)
    side = round(len(sample.layers[drawn[0]][0].weights) ** 0.5)
    dense = sample.target.ndim == 1 and len(sample.target) == side * side
    maps = [_canvas("input", "", "Input: choose a token", focus=True)]
    for name in drawn:
        what = "affinity of codes" if name in hashed else "attention"
        maps.append(_canvas("map", name, f"{name}: {what}", focus=True))
    radios = "".join(
        f'<label><input type="radio" name="layer" value="{i}"{" checked" if i == 0 else ""}> {i + 1}</label>'
        for i in range(depths)
    )
    parts = [
        "<h2>Attention of one token</h2>",
        '<p class="screen">Click a token, or move with the arrow keys. Orange shows what share of its '
        "attention the token pays to every other token; the strongest is opaque.</p>",
        f"<fieldset><legend>Layer</legend>{radios}</fieldset>" if depths > 1 else "",
        f'<div class="panels">{"".join(maps)}<output id="status" aria-live="polite"></output></div>',
    ]
    if hashed:
        codes = "".join(_canvas("codes", name, f"{name}: codes, one picture for each bit") for name in hashed)
        parts += [
            "<h2>Codes as pictures</h2>",
            "<p>Every token becomes a few bits. One small picture shows one bit of all tokens.</p>",
            f'<div class="panels">{codes}</div>',
        ]
    if dense:
        answers = "".join(_canvas("answers", name, name) for name in sample.answers)
        parts += [
            "<h2>Answers</h2>",
            "<p>The class that each model gives to the tokens that were asked for, as a colour. A hollow "
            "square is a wrong answer.</p>",
            f'<div class="panels">{answers}</div>',
        ]
    layers = [
        {
            "model": name,
            "depth": depth,
            "weights": _png(_levels(layer.weights)),
            "codes": None if layer.codes is None else _png(layer.codes.float()),
        }
        for name in drawn
        for depth, layer in enumerate(sample.layers[name])
        if len(layer.weights) == side * side
    ]
    asked = (sample.target >= 0).nonzero().flatten().tolist() if dense else [side * side // 2]
    data = {
        "side": side,
        "classes": sample.classes,
        "picture": _png(sample.picture.permute(1, 2, 0) / 255),
        "target": sample.target.tolist() if dense else [],
        "token": asked[len(asked) // 2],
        "answers": {name: answer.tolist() for name, answer in sample.answers.items()} if dense else {},
        "layers": layers,
    }
    return [*parts, f'<script type="application/json" id="data">{json.dumps(data)}</script>']


def _canvas(role: str, model: str, caption: str, *, focus: bool = False) -> str:
    label = html.escape(caption)
    use = 'class="map" role="application" tabindex="0" aria-describedby="status"' if focus else 'role="img"'
    kind = {"input": ' class="main"', "codes": ' class="codes"'}.get(role, "")
    return (
        f'<figure{kind}><canvas {use} aria-label="{label}" data-role="{role}" '
        f'data-model="{html.escape(model)}"></canvas>'
        f"<figcaption>{label}</figcaption></figure>"
    )


def _levels(weights: Tensor) -> Tensor:
    """Weights relative to the largest of each query, in 32 levels: small files, and the eye sees no more."""
    return (31 * weights / weights.amax(1, keepdim=True).clamp(min=1e-12)).round() / 31


def _png(values: Tensor) -> str:
    """Numbers from 0 to 1, (H, W) or (H, W, 3), as the address of a picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray((values * 255).round().byte().numpy()).save(buffer, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _times(times: Sequence[Mapping[str, Any]]) -> Figure:
    """Milliseconds over tokens, one line for each model."""
    with drawing():
        figure = new_figure(5.4, 3.4)
        axes = figure.subplots()
        for name in dict.fromkeys(row["name"] for row in times):
            own = [row for row in times if row["name"] == name]
            axes.loglog([row["tokens"] for row in own], [row["ms"] for row in own], ".-", label=name)
        ticks = sorted({row["tokens"] for row in times})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="Tokens", ylabel="Time per sample (ms)")
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure


def _curves(runs: Sequence[Run]) -> Figure:
    """Accuracy on the test data, one line for each run."""
    with drawing():
        figure = new_figure(5.4, 3.4)
        axes = figure.subplots()
        for run in runs:
            own = [m for m in run.metrics if m.get("split") == "test" and "accuracy" in m]
            axes.plot([m["step"] for m in own], [100 * m["accuracy"] for m in own], ".-", label=run.name)
        axes.set(xlabel="Step", ylabel="Accuracy (%)")
        axes.grid()
        figure.legend(loc="outside right upper")
    return figure


def _figure(figure: Figure, caption: str) -> str:
    """A figure whose axes and text have the colour of the page's text, light or dark."""
    for axes in figure.axes:
        axes.patch.set_visible(False)
        axes.tick_params(which="both", color=_INK, labelcolor=_INK)
        for spine in axes.spines.values():
            spine.set_color(_INK)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set_color(_INK)
        axes.grid(color=_INK, alpha=0.15)
    for legend in figure.legends:
        for text in legend.get_texts():
            text.set_color(_INK)
    figure.patch.set_visible(False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue().replace(_INK, "currentColor")
    label = html.escape(caption)
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f"<figure>{svg}<figcaption>{label}</figcaption></figure>"


def _recipe(run: Run) -> str:
    recipe, result = as_yaml(Recipe.model_validate(run.result["recipe"])), run.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    facts = f"{result['steps']:,} steps in {result['seconds']:.0f} s on {result['hardware']}; {versions}"
    return (
        f"<details><summary>{html.escape(run.name)}: {html.escape(facts)}</summary>"
        f"<pre>{html.escape(recipe)}</pre></details>"
    )
