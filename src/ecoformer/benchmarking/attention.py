"""`bench attention` and `info --check`: operators, compared with the reference before they are timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecoformer.attention import Attention, HashedAttention, ReformerAttention
from ecoformer.attention.registry import attention_class, create_attention
from ecoformer.benchmarking.contestants import (
    QUICK_FIT,
    Contestant,
    ExplicitAttention,
    Heads,
    bound_of,
    compiled,
    flash_linear_attention,
    hashed_backends,
    median_error,
    reference_attention,
    relative_error,
    steady_tokens,
)
from ecoformer.benchmarking.measuring import Bench, Progress, Work, no_progress, synchronize
from ecoformer.benchmarking.results import Check, Row, Run
from ecoformer.hashing import Hasher

MECHANISMS = ("softmax", "eco", "performer", "linformer", "reformer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SLICE, _ODD = 1024, 333
"""Lengths at which the quadratic reference in fp64 takes less than a second."""
SELF_CHECKS = (
    ((4, 5, 196, 64), 16, 25, False),
    ((4, 1, 3136, 32), 16, 25, False),
    ((4, 2, 1024, 32), 32, 48, False),
    ((2, 2, 300, 96), 8, 10, False),
    ((2, 2, 700, 64), 16, 25, True),
)
"""Shape, bits, support samples and causal order: short heads and long ones, common codes and large ones."""
SHORTEST, LONGEST = 16, 1 << 16
_CLOSE = 1.1
"""Ratio of two lengths that timing cannot tell apart."""
_CLEARLY = 2.0
"""Longer lengths are tried until eco is this many times as fast: it may win, lose again and win."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a shape, and how."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = False
    backward: bool = False
    compiled: bool = False
    seed: int = 0


def bench_attention(settings: Sequence[Setting], mechanisms: Sequence[str], bench: Bench) -> Run:
    """Time mechanisms from tokens to output, hashing included; softmax by SDPA is always among them.

    Args:
        settings: shapes and how to run them.
        mechanisms: registered names, and "explicit" for softmax with its N x N matrix.
        bench: how to measure.
    """
    for setting in settings:
        contestants, hashers = _contestants(dict.fromkeys(("softmax", *mechanisms)), setting, bench.run)
        inputs = draw_inputs(setting, hashers)
        rows = []
        for contestant in contestants:
            bench.progress(f"{setting.shape}: checking {contestant.mechanism} ({contestant.backend})")
            rows.append(checked(contestant, inputs, setting))
            rows[-1].setting["graphs"] = bench.graphs
        bench.measure(rows, [work_of(contestant, inputs, setting.backward) for contestant in contestants])
    bench.run.notes = list(dict.fromkeys(bench.run.notes))
    return bench.run


def _contestants(names: Iterable[str], setting: Setting, run: Run) -> tuple[list[Contestant], list[Hasher]]:
    contestants: list[Contestant] = []
    hashers: list[Hasher] = []
    for name in names:
        if setting.is_causal and name != "explicit" and not attention_class(name).supports_causal:
            run.notes.append(f"{name} has no causal order and is left out")
            continue
        layer = build_layer(name, setting)
        contestants += contestants_of(layer, setting)
        if isinstance(layer, HashedAttention):
            hashers.append(layer.hasher)
    peers, note = flash_linear_attention(setting.device)
    if setting.device.type == "cuda":
        run.notes.append(note)
    return [*contestants, *peers], hashers


def build_layer(mechanism: str, setting: Setting, **options: Any) -> Attention:
    """A layer with default settings except `options`; its hash functions are fitted to random tokens."""
    _, heads, tokens, dim = setting.shape
    if mechanism == "explicit":
        layer: Attention = ExplicitAttention(heads * dim, heads)
    else:
        if attention_class(mechanism).sized_by_tokens:
            options["seq_len"] = tokens
        layer = create_attention(mechanism, heads * dim, heads, **options)
    layer = layer.to(setting.device, setting.dtype).eval().requires_grad_(False)
    if isinstance(layer, HashedAttention):
        generator = torch.Generator().manual_seed(setting.seed)
        samples = torch.randn(2, heads, 128, dim, generator=generator).to(setting.device)
        layer.hasher.fit(samples, options=QUICK_FIT)
    return layer


def contestants_of(layer: Attention, setting: Setting) -> list[Contestant]:
    """The contestants of one layer; hashed attention has one for each backend."""
    module = Heads(layer, setting.is_causal)
    if not isinstance(layer, HashedAttention):
        backend = {"softmax": "sdpa", "explicit": "N x N matrix"}.get(layer.name, "eager")
        return [Contestant(layer.name, backend, module)]
    able = hashed_backends([layer.hasher], setting.device, setting.backward, setting.dtype)
    found = [Contestant(layer.name, name, module, name) for name in able]
    if setting.compiled:
        found.append(Contestant(layer.name, "eager, compiled", module, "eager", compiled(module)))
    return found


def draw_inputs(setting: Setting, hashers: Sequence[Hasher] = ()) -> list[Tensor]:
    """Random q, k, v and gradient of the output. No code of q depends on rounding."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)

    def draw() -> Tensor:
        return torch.randn(setting.shape, generator=generator, device=setting.device).to(setting.dtype)

    projections = [partial(hasher.project, valid=None) for hasher in hashers]
    return [steady_tokens(draw, projections, setting.backward), draw(), draw(), draw()]


def work_of(contestant: Contestant, inputs: Sequence[Tensor], backward: bool) -> Work:
    """What is timed: the output and, with `backward`, the gradients of the inputs."""
    call = contestant.call or contestant.module
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs[:3])
    shared = isinstance(contestant.module, Heads) and contestant.module.layer.shared_qk
    leaves = (q, v) if shared else (q, k, v)

    def work() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            out = call(q, k, v)
        return [out, *torch.autograd.grad(out, leaves, inputs[3])] if backward else [out]

    return Work(work, contestant.use)


def checked(contestant: Contestant, inputs: Sequence[Tensor], setting: Setting) -> Row:
    """A row with its check, or with the reason why it gets no time."""
    about: dict[str, Any] = {"shape": list(setting.shape), "dtype": str(setting.dtype).removeprefix("torch.")}
    about |= {"backward": setting.backward, "causal": setting.is_causal}
    row = Row(contestant.mechanism, contestant.backend, about)
    row.checked = row.check(lambda: _compare(contestant, inputs, setting))
    return row


def _compare(contestant: Contestant, inputs: Sequence[Tensor], setting: Setting) -> Check:
    """Compare with the dense truth on the first tokens, and hashed attention also on the whole shape."""
    batch, heads, tokens, _ = setting.shape
    longest = min(tokens, _SLICE if heads <= 16 else _SLICE // 4)
    cuts = {(max(1, min(batch, 8 // heads)), length) for length in (longest, min(_ODD, longest))}
    if contestant.call is not None:  # every other length would be compiled again
        cuts.clear()
    if contestant.use is not None:
        cuts.add((batch, tokens))
    layer = contestant.module.layer if isinstance(contestant.module, Heads) else None
    measure = median_error if isinstance(layer, ReformerAttention) else relative_error
    # For many tokens fp64 would take too much memory.
    many = contestant.use is not None and math.prod(setting.shape) > 1 << 26
    dtype = torch.float32 if many else torch.float64
    truth = Contestant("", "", copy.deepcopy(contestant.module).to(dtype))
    bound, shares = bound_of(setting.dtype, setting.backward), []
    with reference_attention(truth.module) as long:
        for samples, length in cuts:
            part = [x[:samples, :, :length] for x in inputs]
            found = work_of(contestant, part, setting.backward)()
            expected = work_of(truth, [x.to(dtype) for x in part], setting.backward)()
            shares.append(measure(found, expected) / bound_of(setting.dtype, setting.backward, length))
    work_of(contestant, inputs, setting.backward)()  # see that it runs at its own length
    synchronize(setting.device)
    worst = float(torch.tensor(shares, dtype=torch.float64).max())  # NaN if any is
    names = {"softmax": "dense softmax in fp64", "explicit": "SDPA in fp64"}
    against = "the reference in fp64" if contestant.use else names.get(contestant.mechanism, "itself in fp64")
    return Check(
        worst * bound, bound, against + (", eager at full length" if long and contestant.use else "")
    )


def check_backends(device: torch.device, progress: Progress = no_progress) -> Iterator[Row]:
    """Compare the fused backends with the reference: compiler, driver and device may all break them."""
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    for shape, bits, support, causal in SELF_CHECKS:
        for dtype in (torch.float32, *half):
            setting = Setting(shape, dtype, device, causal)
            layer = build_layer("eco", setting, bits=bits, support=support)
            if not isinstance(layer, HashedAttention):
                raise TypeError("another mechanism, without hashing, is registered as 'eco'")
            for backward in (False, True):
                how = replace(setting, backward=backward)
                inputs: list[Tensor] = []
                for contestant in contestants_of(layer, how):
                    if contestant.use == "eager":
                        continue
                    progress(f"{contestant.backend}: {shape} in {dtype}, {bits} bits")
                    inputs = inputs or draw_inputs(how, [layer.hasher])
                    row = checked(contestant, inputs, how)
                    row.setting |= {"bits": bits, "support": support}
                    yield row


def find_crossover(setting: Setting, bench: Bench, longest: int = LONGEST) -> dict[str, Any]:
    """Double the length until eco is clearly faster, then bisect after the last length where it was slower.

    Args:
        setting: batch, heads, channels and the rest; its number of tokens is ignored.
        bench: how to measure at each length.
        longest: where to give up.

    Returns:
        `tokens`, the length from which eco was faster (None: not even at the longest); `slower_at`, the
        longest length where it was not (None: always faster); `backend`, the faster one; `ratios`, the speed
        relative to SDPA at each length; `quiet`, whether no other program was seen to use the CPU.
    """
    batch, heads, _, dim = setting.shape
    best: dict[int, Row] = {}
    quiet = True

    def speed(tokens: int) -> float:
        nonlocal quiet
        at_length = replace(setting, shape=(batch, heads, tokens, dim))
        run = bench_attention([at_length], ("eco",), replace(bench, memory=False, energy=False))
        best[tokens] = max(run.rows[1:], key=lambda row: row.ratio_to_sdpa or 0.0)
        quiet = quiet and run.quiet
        ratio = best[tokens].ratio_to_sdpa
        if run.wrong or ratio is None:
            why = "; ".join(f"{row.label}: {row.failure}" for row in run.rows if row.failure)
            raise RuntimeError(f"nothing to compare at {at_length.shape}: {why}")
        return ratio

    slower, faster, tokens = None, None, min(SHORTEST, longest)
    while True:
        ratio = speed(tokens)
        if ratio <= 1:
            slower, faster = tokens, None
        elif faster is None:
            faster = tokens
        if tokens >= longest or ratio >= _CLEARLY:
            break
        tokens = min(2 * tokens, longest)
    while faster and slower and faster - slower > 1 and faster / slower > _CLOSE:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if speed(middle) > 1 else (middle, faster)
    return {
        "tokens": faster,
        "slower_at": slower,
        "backend": None if faster is None else best[faster].backend,
        "ratios": {length: best[length].ratio_to_sdpa for length in sorted(best)},
        "quiet": quiet,
    }


def crossover_sentence(found: dict[str, Any]) -> str:
    """A crossover in words."""
    ratios, slower, faster = found["ratios"], found["slower_at"], found["tokens"]
    busy = "" if found["quiet"] else "not reliable, the machine is busy: "
    if faster is None:
        return f"{busy}eco does not overtake SDPA up to N = {max(ratios):,}"
    eco = f"{busy}eco ({found['backend']})"
    if slower is None:
        return f"{eco} is faster than SDPA at every N from {faster:,} to {max(ratios):,}"
    speeds = f"{ratios[slower]:.2f} and {ratios[faster]:.2f} times as fast"
    return f"{eco} overtakes SDPA between N = {slower:,} and {faster:,} ({speeds})"


def plot_lengths(run: Run, path: Path) -> None:
    """Plot time and peak memory of each contestant against N."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'ecoformer[figures]'") from error

    timed = sorted((row for row in run.rows if row.timing), key=_tokens)
    if not timed:
        raise ValueError("no times to plot: every contestant failed")
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    for index, label in enumerate(dict.fromkeys(row.label for row in run.rows if row.timing)):
        rows = [(_tokens(row), row.timing, row.peak_mb) for row in timed if row.label == label and row.timing]
        style = {"marker": "osD^vP*X"[index % 8], "color": f"C{index % 10}", "label": label}
        lengths = [tokens for tokens, _, _ in rows]
        times.plot(lengths, [timing.median_ms for _, timing, _ in rows], **style)
        low, high = [timing.low_ms for _, timing, _ in rows], [timing.high_ms for _, timing, _ in rows]
        times.fill_between(lengths, low, high, color=style["color"], alpha=0.2, linewidth=0)
        memory.plot(lengths, [mb for _, _, mb in rows], **style)
    how = run.rows[0].setting
    batch, heads, _, dim = how["shape"]
    passes = ("forward and backward" if how["backward"] else "forward") + (
        ", causal" if how["causal"] else ""
    )
    figure.suptitle(f"B = {batch}, H = {heads}, D = {dim}, {how['dtype']}, {passes}; {run.device}")
    ticks = sorted({_tokens(row) for row in run.rows})
    for axes, title in ((times, "milliseconds per call (quartiles shaded)"), (memory, "peak memory, MB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens N", title=title)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=150)


def _tokens(row: Row) -> int:
    return int(row.setting["shape"][2])
