"""The page on results shows what the result files hold."""

import csv
import json
import math
import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "results.md").read_text()
PRINTED = ROOT / "src" / "ecoformer" / "report" / "printed"


def rows_of(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]["rows"]


def printed():
    rows = {}
    for table in ("cifar100_binarization", "cifar100_hash_functions", "cifar100_attentions"):
        for row in csv.DictReader((PRINTED / f"{table}.csv").read_text().splitlines()):
            if row.get("model", "pvt_v2_b0") == "pvt_v2_b0":
                rows[{"transformer": "softmax"}.get(row["method"], row["method"])] = row
    return rows


def from_scratch():
    """Rows of the first seed, and accuracies of the second."""
    first = {row["label"]: row for name in ("cifar100", "cifar100_others") for row in rows_of(name)}
    return first, {row["label"]: row["accuracy"] for row in rows_of("cifar100_second")}


def test_every_mechanism_stands_beside_the_printed_figures():
    paper, (first, second) = printed(), from_scratch()
    for label, row in first.items():
        cells = [f"{100 * row['accuracy']:.2f} %", f"{100 * second[label]:.2f} %" if label in second else ""]
        cells += [f"{row['energy_pj'] / 1e9:.2f} mJ"]
        other = paper.get(label)
        cells += ["", ""] if other is None else [f"{float(other['top1']):.2f} %"]
        cells += [] if other is None else [f"{float(other['energy_bpj']):.2f} mJ"]
        name = re.escape(label.replace(":", ", "))
        line = re.search(rf"^\| {name}(?: \(k = 256\))? \|(.*)\|$", PAGE, re.MULTILINE)
        assert [cell.strip() for cell in line.group(1).split("|")] == cells, row


def test_two_seeds_are_summed_up():
    first, second = from_scratch()
    means = {name: 50 * (first[name]["accuracy"] + other) for name, other in second.items()}
    words = " ".join(PAGE.split())
    assert f"hashed attention is {means['softmax'] - means['eco']:.1f} points behind softmax" in words
    above = [f"{means[name] - means['eco']:.1f}" for name in ("klsh_eco", "lsh_eco")]
    assert f"`klsh_eco` is {above[0]} and `lsh_eco` {above[1]} points above `eco`" in words
    accuracies = [100 * row["accuracy"] for row in first.values()]
    assert f"all lie within {max(accuracies) - min(accuracies):.1f} points" in words
    assert 0.5 < max(100 * (first[name]["accuracy"] - other) for name, other in second.items()) < 1.1


def test_the_readme_shows_the_same():
    readme, paper = (ROOT / "README.md").read_text(), printed()
    names = re.search(r"^\| \| (softmax \|.*) \|$", readme, re.MULTILINE).group(1).split(" | ")
    ours, second = from_scratch()
    lines = {
        "second seed": [f"{100 * second[n]:.2f} %" if n in second else "" for n in names],
        "accuracy, ours": [f"{100 * ours[n]['accuracy']:.2f} %" for n in names],
        "energy, ours": [f"{ours[n]['energy_pj'] / 1e9:.2f} mJ" for n in names],
        "accuracy, paper": [f"{float(paper[n]['top1']):.2f} %" for n in names],
        "energy, paper": [f"{float(paper[n]['energy_bpj']):.2f} mJ" for n in names],
    }
    for label, cells in lines.items():
        assert f"| {label} | {' | '.join(cells)} |".replace("  ", " ") in readme
    gap = ours["softmax"]["accuracy"] + second["softmax"] - ours["eco"]["accuracy"] - second["eco"]
    assert f"`eco` stays {50 * gap:.1f} points behind softmax" in readme
    for row in rows_of("cifar100_finetuned"):
        if row["label"] in ("softmax, 10 more epochs", "eco, taught by the softmax model"):
            assert f"{100 * row['accuracy']:.2f} %" in readme


def test_speed():
    parts = json.loads((ROOT / "results" / "cifar100_speed.json").read_text())["figures"]
    best = {part: {} for part in parts}
    for part, found in parts.items():
        for row in found["rows"]:
            assert row["checked"]["passed"]
            rates = best[part]
            rates[row["mechanism"]] = max(rates.get(row["mechanism"], 0), row["images_per_s"])
    assert len(best["inference"]) == 10
    for name, rate in best["inference"].items():
        assert f"| {name} | {rate:,.0f} | {best['training'][name]:,.0f} |" in PAGE


def test_fewer_bits_and_support_samples():
    rows = {row["label"]: row for row in rows_of("cifar100_codes")}
    for label, cells in (("eco:support=10", "16 | 10"), ("eco:bits=8", "8 | 25")):
        row = rows[label]
        assert f"| {cells} | {100 * row['accuracy']:.2f} % | {row['energy_pj'] / 1e9:.2f} mJ |" in PAGE
    plain = next(row for row in rows_of("cifar100_finetuned") if row["label"] == "eco")
    assert f"| 16 | 25 | {100 * plain['accuracy']:.2f} % | {plain['energy_pj'] / 1e9:.2f} mJ |" in PAGE


def test_fine_tuning_is_shown_as_measured():
    rows = rows_of("cifar100_finetuned")
    for row in rows:
        assert f"| {row['label']} | {100 * row['accuracy']:.2f} % |" in PAGE
    by_label = {row["label"]: row["accuracy"] for row in rows}
    gap = by_label["softmax, 10 more epochs"] - by_label["eco, taught by the softmax model"]
    assert f"within {100 * gap:.2f} points" in PAGE


def test_fine_tuning_at_224_pixels():
    figures = json.loads((ROOT / "results" / "cifar100_224.json").read_text())["figures"]
    rows = {row["label"]: row for row in figures["rows"]}
    for label, row in rows.items():
        assert f"| {label} | {100 * row['accuracy']:.2f} % | {row['energy_pj'] / 1e9:.2f} mJ |" in PAGE
    gap = 100 * (rows["softmax"]["accuracy"] - rows["eco"]["accuracy"])
    saved = 100 * (1 - rows["eco"]["energy_pj"] / rows["softmax"]["energy_pj"])
    assert f"That is {gap:.2f} points for a saving of {saved:.0f} %." in PAGE
    assert f"({100 * figures['start']['accuracy']:.2f} %)" in PAGE
    assert f"{100 * figures['unfinished']['eco, teacher.weight=0']['4']:.2f} % after 4 epochs" in PAGE


def test_reviews_stand_beside_the_printed_figures():
    with (PRINTED / "long_range_arena.csv").open() as file:
        paper = {
            {"transformer": "softmax"}.get(row["method"], row["method"]): row for row in csv.DictReader(file)
        }
    for row in rows_of("imdb"):
        cells = [row["label"].replace(":", ", "), f"{100 * row['accuracy']:.2f} %"]
        cells += [f"{100 * row['best_accuracy']:.2f} %", f"{row['energy_pj'] / 1e9:.2f} mJ"]
        other = paper.get(row["label"])
        cells += ["", ""] if other is None else [f"{other['text_4k']} %", f"{other['energy_bpj']} mJ"]
        assert " ".join(f"| {' | '.join(cells)} |".split()) in " ".join(PAGE.split())


def test_lists_are_shown_as_measured():
    for row in rows_of("listops"):
        cells = (
            row["label"].replace(":", ", "),
            f"{100 * row['accuracy']:.1f} %",
            f"{row['energy_pj'] / 1e9:.2f} mJ",
        )
        assert f"| {' | '.join(cells)} |" in PAGE


def test_recall_is_shown_as_measured():
    rows = rows_of("recall")
    pairs = sorted({int(row["point"]["data.options.pairs"]) for row in rows})
    assert f"| pairs | {' | '.join(map(str, pairs))} |" in PAGE
    for label in {row["label"] for row in rows}:
        name, _, settings = label.partition(":")
        numbers = dict(setting.split("=") for setting in settings.split(",") if settings)
        if name == "eco":
            name += f", {numbers.get('bits', 16)} bits, {numbers.get('support', 25)} support samples"
        found = {
            int(row["point"]["data.options.pairs"]): row["accuracy"] for row in rows if row["label"] == label
        }
        cells = " | ".join(f"{100 * found[n]:.1f} %" if n in found else "not run" for n in pairs)
        assert f"| {name} | {cells} |" in PAGE


def test_guessing_the_most_frequent_value():
    generator = torch.Generator().manual_seed(0)
    words = re.search(r"is right in (\d+), (\d+), (\d+) and (\d+) %", " ".join(PAGE.split()))
    for pairs, share in zip((8, 16, 32, 64), words.groups(), strict=True):
        values = torch.randint(16, (20_000, pairs), generator=generator)
        counts = torch.nn.functional.one_hot(values, 16).sum(1)
        assert abs(100 * float(counts.amax(1).double().mean()) / pairs - int(share)) < 0.6


def test_masked_bytes_are_shown_as_measured():
    for row in [*rows_of("masked_bytes"), *rows_of("masked_bytes_hashed")]:
        bits = row["test_loss"] / math.log(2)
        label = row["label"].replace(":", ", ")
        assert f"| {label} | {bits:.2f} | {100 * row['accuracy']:.1f} % |" in PAGE
