"""The page on the GPU's kernels shows what the result files hold."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "kernels_gpu.md").read_text()
PAGE = " ".join(TEXT.split())


def figures(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]


KERNELS, MODELS, COMPILED = (figures(name) for name in ("gpu_kernels", "gpu_models", "gpu_models_compiled"))
ORDER = [("explicit", "N x N matrix"), ("softmax", "sdpa"), ("performer", "eager"), ("eco", "eager")]
ORDER += [("eco", "triton")]


def time(row, name):
    return f"{1e3 * row['ms'][name]:.0f} ({1e3 * row['called_ms'][name]:.0f})" if name in row["ms"] else ""


@pytest.mark.parametrize("row", KERNELS["time"]["rows"], ids=str)
def test_times(row):
    ms, bandwidth = row["ms"], KERNELS["ceilings"]["rows"][0]["copy_tb_per_s"]
    floor = row["floor_bytes"] / bandwidth / 1e6
    cells = [", ".join(map(str, row["shape"]))]
    cells += [time(row, name) for name in ("triton", "sdpa", "compiled", "eager")]
    cells.append(f"{floor:.1f}" if floor < 10 else f"{floor:.0f}")
    cells += [f"{ms[name] / ms['triton']:.1f}" if name in ms else "" for name in ("sdpa", "compiled")]
    assert " ".join(f"| {' | '.join(cells)} |".split()) in PAGE


def test_nothing_was_timed_that_was_not_right():
    assert len(KERNELS["check"]["rows"]) == 15
    assert all(row["right"] and row["repeats_equal"] for row in KERNELS["check"]["rows"])
    assert "15 of 15 cases" in PAGE
    bandwidth = KERNELS["ceilings"]["rows"][0]["copy_tb_per_s"]
    assert f"bandwidth of a copy ({bandwidth:.2f} TB/s)" in PAGE
    halves = [row for row in KERNELS["check"]["rows"] if row["dtype"] == "torch.bfloat16"]
    assert max(row["triton"][1] / row["eager"][1] for row in halves) < 1.05
    assert "at most 5 % above eager's" in PAGE


def test_the_readme_shows_the_same():
    readme = " ".join((ROOT / "README.md").read_text().split())
    one, both = (row["ms"] for row in KERNELS["time"]["rows"] if row["shape"] == [256, 1, 3136, 32])
    assert f"take {1e3 * one['triton']:.0f} µs" in readme
    assert f"SDPA takes {1e3 * one['sdpa']:.0f} " in readme
    assert f"compiled PyTorch {1e3 * one['compiled']:.0f};" in readme
    assert f"backward {1e3 * both['triton']:.0f} against {1e3 * both['sdpa']:.0f} " in readme


def test_growth():
    rows = {(row["shape"][2], row["backward"]): row for row in KERNELS["growth"]["rows"]}
    for tokens in {tokens for tokens, _ in rows}:
        one, both = rows[tokens, False], rows[tokens, True]
        cells = f"{tokens:,} | {1e3 * one['ms']['triton']:.0f} µs | {1e3 * both['ms']['triton']:.0f} µs"
        assert f"| {cells} | {both['peak_gb']:.1f} GB |" in PAGE


def test_causal_order():
    rows = {(*row["shape"], row["backward"]): row["ms"] for row in KERNELS["causal"]["rows"]}
    times = {key: [f"{1e3 * ms[name]:.0f}" for name in ("triton", "sdpa")] for key, ms in rows.items()}
    (one, of_one), (both, of_both) = (times[1, 8, 65_536, 64, backward] for backward in (False, True))
    assert f"{one} µs forward, where causal SDPA takes {of_one}, and {both} with the backward" in PAGE
    assert f"where it takes {of_both}. At (32, 1, 3136, 32)" in PAGE
    (one, of_one), (both, of_both) = (times[32, 1, 3136, 32, backward] for backward in (False, True))
    assert f"it is {one} against {of_one}, and {both} against {of_both}." in PAGE


def test_before_and_after():
    for phase in ("before", "asynchronous", "time"):
        rows = [row for row in KERNELS[phase]["rows"] if row["shape"] == [256, 1, 3136, 32]]
        assert " | ".join(f"{1e3 * row['ms']['triton']:.0f}" for row in rows) in PAGE


@pytest.mark.parametrize("part", MODELS)
def test_whole_models(part):
    rows = MODELS[part]["rows"]
    for batch in {row["batch"] for row in rows}:
        here = {(row["mechanism"], row["backend"]): row for row in rows if row["batch"] == batch}
        speeds = [here[key].get("images_per_s") for key in ORDER]
        cells = ["out of memory" if speed is None else f"{speed:.0f}" for speed in speeds]
        assert f"| {' | '.join(cells)} | {here['eco', 'triton']['ratio_to_sdpa']:.2f} |" in PAGE
        assert all(row["checked"]["passed"] for row in here.values() if row.get("images_per_s"))


def compiled_rows(part):
    rows = COMPILED[part]["rows"]
    assert all(row["checked"]["passed"] for row in rows)
    return {(row["mechanism"], row["backend"].removesuffix(", compiled")): row for row in rows}


def cell(row):
    return "withdrawn" if row["images_per_s"] is None else f"{row['images_per_s']:.0f}"


@pytest.mark.parametrize("part", COMPILED)
def test_whole_models_compiled(part):
    here = compiled_rows(part)
    cells = ["not run" if key not in here else cell(here[key]) for key in ORDER]
    assert f"| {' | '.join(cells)} | {here['eco', 'triton']['ratio_to_sdpa']:.2f} |" in PAGE


def test_compiled_models_are_summed_up():
    ratios, matrix = {}, []
    for part in COMPILED:
        here = compiled_rows(part)
        ratios[part] = here["eco", "triton"]["ratio_to_sdpa"]
        if here.get(("explicit", "N x N matrix"), {}).get("median_ms"):
            matrix.append(here["explicit", "N x N matrix"]["median_ms"] / here["eco", "triton"]["median_ms"])
    at_224 = [ratio for part, ratio in ratios.items() if part.startswith("224")]
    assert f"{min(matrix):.1f} to {max(matrix):.1f} times the paper's baseline" in PAGE
    assert f"{min(at_224):.2f} to {max(at_224):.2f} times SDPA" in PAGE
    assert f"512 pixels {ratios['512, batch 32']:.2f} times SDPA" in PAGE


def test_the_profile():
    profile, rows = figures("gpu_profile"), compiled_rows("512, batch 32")
    total = profile["total_us"]
    ours = sum(row["us"] for row in profile["kernels"] if row["kernel"] in ("gather", "read"))
    assert f"`gather` and `read` take {ours:.0f} of {total} µs" in PAGE
    assert f"attention is {100 * ours / total:.0f} % of what is left" in PAGE
    times = [rows[key]["median_ms"] for key in (("softmax", "sdpa"), ("eco", "triton"))]
    assert times[0] / (times[1] * (1 - ours / total)) < 4


def test_where_it_overtakes_sdpa():
    found = figures("lengths_gpu")
    rows = [*found["crossover"], *found["crossover_of_graphs_beside_other_work"]]
    table = {}
    for row in rows:
        assert row.get("backend", "triton") == "triton"
        cell = "-" if row["slower_at"] is None else f"{row['tokens']:,}"
        table.setdefault((row["batch"], row["heads"], row["channels"]), []).append(cell)
    for shape, cells in table.items():
        assert len(cells) == 4
        assert f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |" in PAGE
    rows = [row for row in found["lengths"] if row["backend"] == "triton"]
    first = min(row["shape"][2] for row in rows if row["ratio_to_sdpa"] > 1)
    assert f"from {first:,} tokens on" in PAGE
    assert (ROOT / "docs" / "figures" / "lengths_gpu.svg").is_file()


def test_training():
    rows = {(row["mechanism"], row["backend"]): row for row in figures("gpu_training")["rows"]}
    assert not rows["explicit", "N x N matrix, compiled"]["checked_as_timed"]["passed"]
    sdpa, performer, eager, triton = (
        rows[mechanism, f"{backend}, compiled"]
        for mechanism, backend in (ORDER[1], ORDER[2], ORDER[3], ORDER[4])
    )
    assert all(row["checked_as_timed"]["passed"] for row in (sdpa, performer, eager, triton))
    speeds = [f"{row['images_per_s']:.0f}" for row in (sdpa, performer, eager, triton)]
    assert (
        f"SDPA {speeds[0]}, performer {speeds[1]}, eco by eager {speeds[2]} and by Triton {speeds[3]}" in PAGE
    )
    assert f"{triton['ratio_to_sdpa']:.2f} times SDPA. The N × N matrix has no time there" in PAGE


def test_energy():
    rows = {(row["mechanism"], row["backend"]): row["energy"] for row in figures("gpu_energy")["rows"]}
    sdpa, eager, triton = (
        1e3 * rows[key]["joules"] for key in (("softmax", "sdpa"), ("eco", "eager"), ("eco", "triton"))
    )
    assert f"{sdpa:.0f} mJ by SDPA, {eager:.0f} by eager hashed attention and {triton:.0f} by Triton" in PAGE
    model = compiled_rows("224, batch 256")
    sdpa, matrix, triton = (
        1e3 * model[key]["energy"]["per_item_joules"] for key in (ORDER[1], ORDER[0], ORDER[-1])
    )
    assert (
        f"{sdpa:.1f} mJ a picture with SDPA, {matrix:.1f} with the matrix and {triton:.1f} with Triton"
        in PAGE
    )
    readme = " ".join((ROOT / "README.md").read_text().split())
    small, large = (compiled_rows(f"224, batch {n}")[ORDER[-1]]["ratio_to_sdpa"] for n in (32, 256))
    assert f"handles {small:.2f} times as many pictures" in readme
    assert (
        f"{large:.2f} times at batch 256, where it takes {triton:.1f} mJ a picture and SDPA {sdpa:.1f}"
        in readme
    )
