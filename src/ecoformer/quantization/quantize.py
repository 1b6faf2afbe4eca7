"""`quantize` converts a trained model to int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ecoformer.arguments import one_line
from ecoformer.attention.eco import SharpEcoAttention
from ecoformer.conversion.convert import put, unwrapped
from ecoformer.conversion.layers import kind_of
from ecoformer.conversion.learning import relative_mse
from ecoformer.hashing.fitting import Forward, check_batches, move, progress_bar, run
from ecoformer.hashing.kernel import MAX_BITS
from ecoformer.quantization.attention import IntegerAttention
from ecoformer.quantization.layers import (
    HIGHEST,
    LARGEST,
    LOWEST,
    MOST_INPUTS,
    Grid,
    IntegerConv2d,
    IntegerLinear,
)
from ecoformer.running import eval_mode, without_fast_path

_KEPT = 1 << 12
"""Numbers of a tensor that are kept of each batch, to choose a grid by."""
_CLIPS = [1.0 - 0.04 * i for i in range(16)]
"""Parts of the range that a grid may cover."""
_MOST_TIMES = 1 << 14
"""Values may be this many times as large as outputs, see `integer_multiplier`."""
Integer = IntegerLinear | IntegerConv2d | IntegerAttention


class Observer:
    """The range of a tensor and a sample of its numbers, over all batches."""

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self.peaks: Tensor | None = None
        self._kept: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def see(self, x: Tensor, heads: int | None = None) -> None:
        """Another batch; with `heads`, the largest number of each head is kept too."""
        x = x.detach().float()
        low, high = torch.aminmax(x)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ValueError("NaN or infinity")
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        flat = x.flatten()
        if len(flat) > _KEPT:  # at random: a regular step would meet the same channels again and again
            drawn = torch.randint(len(flat), (_KEPT,), generator=self._generator)
            flat = flat[drawn.to(flat.device)]
        self._kept.append(flat)
        if heads is not None:
            peaks = torch.unflatten(x, -1, (heads, -1)).abs().flatten(0, -3).amax(dim=(0, 2))
            self.peaks = peaks if self.peaks is None else torch.maximum(self.peaks, peaks)

    def grid(self) -> Grid:
        """The grid on which the sample loses least."""
        sample = torch.cat(self._kept)
        found = [self._grid(clip) for clip in _CLIPS]
        return min(found, key=lambda grid: float((on_grid(sample, *grid) - sample).square().sum()))

    def _grid(self, clip: float) -> Grid:
        low, high = self.low * clip, self.high * clip
        scale = max(high - low, 1e-12) / (HIGHEST - LOWEST)
        return Grid(scale, LOWEST - round(low / scale))

    def largest(self) -> float:
        """How far a grid without a zero of its own should reach."""
        sample, top = torch.cat(self._kept), max(-self.low, self.high)
        reach = [top * clip for clip in _CLIPS]
        grids = {end: Grid(max(end, 1e-12) / LARGEST) for end in reach}
        return min(reach, key=lambda end: float((on_grid(sample, *grids[end]) - sample).square().sum()))


def on_grid(x: Tensor, scale: float, zero: int = 0) -> Tensor:
    """The numbers of a grid that are nearest to x."""
    return ((torch.round(x / scale) + zero).clamp(LOWEST, HIGHEST) - zero) * scale


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer: what it is, the scale of its input, the share of numbers that the grid cuts off, its error.

    The error is that of its output, as a share of the mean square. `why` says why a layer stays as it is.
    """

    name: str
    kind: str
    scale: float | None
    saturation: float | None
    error: float | None
    why: str | None = None


@dataclass(frozen=True)
class Quantization:
    """What `quantize` did, layer by layer."""

    model: str
    layers: tuple[QuantizedLayer, ...]
    megabytes: tuple[float, float]
    """Of parameters and buffers, before and after."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        done = [layer for layer in self.layers if layer.why is None]
        before, after = self.megabytes
        lines = [
            f"{self.model}: {len(done)} of {len(self.layers)} layers in int8, {before:.1f} MB before, "
            f"{after:.1f} MB after",
        ]
        if done:
            width = max(len(layer.name) for layer in done)
            lines.append(f"  {'layer':<{width}}  {'kind':<9}   scale  cut off    error")
        for layer in done:
            numbers = f"{layer.scale:7.2g}  {layer.saturation:7.2%}  {layer.error:7.1e}"
            lines.append(f"  {layer.name:<{width}}  {layer.kind:<9} {numbers}")
        lines += [f"stays: {each.name} ({each.kind}): {each.why}" for each in self.layers if each.why]
        return "\n".join(lines)


@torch.inference_mode(mode=False)  # else nothing could be loaded into the new buffers
@torch.no_grad()
def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int = 128,
    max_error: float = 0.1,
    forward: Forward | None = None,
    progress: bool = True,
) -> Quantization:
    """Convert a trained model to int8, in place: linear layers, convolutions and `sharp_eco` attention.

    Each batch runs twice: to calibrate the range of each layer, and to measure its error. The first one also
    runs through the finished model. No training is needed. Everything else (norms, activations, residual
    sums, softmax) stays in floating point. If anything is wrong, the model stays as it was.

    Args:
        model: a trained model; it runs in eval mode and keeps its own.
        batches: batches of real data, as `fit_hashers` takes them, or a data loader.
        samples: the first batches that hold this many samples are used.
        max_error: layers whose output has a larger error (mean square, relative) stay in floating point.
        forward: how to run a batch, if not by `model(batch)`.
        progress: whether to show the progress on stderr.

    Raises:
        ValueError: if there are no batches, if the model is quantised already, if a batch leads to NaN, or if
            the quantised model cannot run.
    """
    if not (isinstance(max_error, (int, float)) and max_error > 0):
        raise ValueError(f"max_error must be a number above 0, got {max_error!r}")
    model = unwrapped(model)
    batches = _first_batches(model, batches, samples)
    found, forward = _candidates(model), forward or run
    before = _megabytes(model)
    with eval_mode(model), without_fast_path(), progress_bar(2 * len(batches), progress) as tick:
        seen, causal = _observe(model, found, batches, forward, lambda: tick("ranges"))
        made, layers = _build(found, seen, causal)
        errors = _measure(model, found, made, batches, forward, lambda: tick("errors"))
    for name, new in list(made.items()):
        scale, (error, cut) = _input_grid(new).scale, errors[name]
        why = None if error <= max_error else f"its error would be {error:.2f}"
        why = "only the first of two passes reached it" if math.isnan(cut) else why
        layers[name] = QuantizedLayer(name, kind_of(found[name]), scale, cut, error, why)
        if why is not None:
            del made[name]
    if not made:
        first = next(iter(layers.values()))
        raise ValueError(f"{type(model).__name__} has no layer that int8 can take: {first.name}: {first.why}")
    for name, new in made.items():
        put(model, found[name], new.train(found[name].training))
    try:
        with eval_mode(model):
            _run_all(model, batches[:1], forward, lambda: None)
    except Exception as error:
        for name, new in made.items():
            put(model, new, found[name])
        raise ValueError(
            f"{type(model).__name__} does not run with integer layers and stays as it was: {one_line(error)}"
        ) from error
    for name, module in _closed(model).items():
        why = "PyTorch reads its weights past its layers"
        layers[name] = QuantizedLayer(name, kind_of(module), None, None, None, why)
    return Quantization(type(model).__name__, tuple(layers.values()), (before, _megabytes(model)))


def _first_batches(model: nn.Module, batches: Iterable[Any], samples: int) -> list[Any]:
    """The first batches that hold `samples` samples; those without tensors count as one."""
    check_batches(batches)
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, which holds no numbers: load its weights"
        )
    taken: list[Any] = []
    for batch in batches:
        taken.append(batch)
        tensors = [
            x
            for x in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
            if isinstance(x, Tensor) and x.ndim
        ]
        samples -= len(tensors[0]) if tensors else 1
        if samples <= 0:
            break
    return taken


def requantize(model: nn.Module, names: list[str]) -> None:
    """Put integer layers without weights in place of the named layers, for a checkpoint to fill."""
    found = _candidates(model)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{type(model).__name__} has no layer {missing[0]!r} to quantise")
    for name in names:
        put(model, found[name], _like(found[name]).train(found[name].training))


def integer_layers(model: nn.Module) -> list[str]:
    """The names of a model's integer layers; those inside an attention layer belong to it."""
    found = [name for name, module in model.named_modules() if isinstance(module, Integer)]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that int8 may take, by name; those inside of an integer attention belong to it."""
    if integer_layers(model):
        raise ValueError(f"model: {type(model).__name__} is quantised already: quantise the original")
    found: dict[str, nn.Module] = {}
    closed = tuple(f"{name}." for name in _closed(model))
    for name, module in model.named_modules():
        if name.startswith(closed):
            continue
        if type(module) is SharpEcoAttention and module.hasher.bits <= MAX_BITS:
            found[name] = module
            closed = (*closed, f"{name}.")
        elif type(module) in (nn.Linear, nn.Conv2d):
            found[name] = module
    found.pop("", None)
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no linear layer, convolution or sharp_eco layer to quantise"
        )
    return found


def _closed(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of PyTorch that read the weights of their layers, which must stay as they are."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
        inside = name.startswith(tuple(f"{other}." for other in found))
        if isinstance(attention, nn.MultiheadAttention) and not inside:
            found[name] = module
    return found


def _like(module: Any) -> Integer:
    if isinstance(module, nn.Linear):
        weight = module.weight
        return IntegerLinear(module.in_features, module.out_features, weight.device, weight.dtype)
    return IntegerConv2d(module) if isinstance(module, nn.Conv2d) else IntegerAttention(module)


def _watched(module: Any) -> dict[str, tuple[nn.Module, str]]:
    """Whose inputs or outputs a layer's grids are chosen by."""
    if isinstance(module, SharpEcoAttention):
        return {"input": (module, "input"), "values": (module.v, "output"), "output": (module.proj, "input")}
    watched = {"input": (module, "input")}
    return watched | {"output": (module, "output")} if isinstance(module, nn.Conv2d) else watched


def _observe(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    batches: list[Any],
    forward: Forward,
    tick: Callable[[], None],
) -> tuple[dict[str, dict[str, Observer]], set[str]]:
    """The ranges of every layer that the batches reach, and which layers attend in causal order."""
    seen: dict[str, dict[str, Observer]] = {}
    causal: set[str] = set()

    def watch(name: str, what: str, side: str, module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
        x = _input(args, kwargs) if side == "input" else out
        if x.numel() == 0:
            return
        owner: Any = found[name]
        heads = owner.num_heads if what == "values" else None
        try:
            seen.setdefault(name, {}).setdefault(what, Observer()).see(x, heads)
        except ValueError as error:
            raise ValueError(f"batches lead to {error} in {name} ({what})") from error
        if kwargs.get("is_causal"):
            causal.add(name)

    with ExitStack() as stack:
        for name, module in found.items():
            for what, (owner, side) in _watched(module).items():
                hook: Any = partial(watch, name, what, side)
                register: Any = (
                    owner.register_forward_pre_hook if side == "input" else owner.register_forward_hook
                )
                stack.callback(register(hook, with_kwargs=True).remove)
        _run_all(model, batches, forward, tick)
    if not batches:
        raise ValueError("batches is empty: quantisation needs some real data to find ranges")
    return seen, causal


def _build(
    found: Mapping[str, nn.Module], seen: Mapping[str, Mapping[str, Observer]], causal: set[str]
) -> tuple[dict[str, Integer], dict[str, QuantizedLayer]]:
    """Integer layers, and why others stay as they are."""
    made: dict[str, Integer] = {}
    layers: dict[str, QuantizedLayer] = {}
    for name, module in found.items():
        why = None if name in seen else "no batch reached it"
        why = "it attends in causal order" if name in causal else why
        why = why or _problem(module, seen[name])
        if why is not None:
            layers[name] = QuantizedLayer(name, kind_of(module), None, None, None, why)
            continue
        ranges, new = seen[name], _like(module)
        grid = ranges["input"].grid()
        if isinstance(new, IntegerAttention):
            peaks: Any = ranges["values"].peaks
            new.fill_from(module, grid, peaks, ranges["output"].largest())  # type: ignore[arg-type]
        else:
            new.fill(module.weight, module.bias, grid)  # type: ignore[arg-type]
            if isinstance(new, IntegerConv2d):
                new.set_grid("output", ranges["output"].grid())
        made[name] = new
    return made, layers


def _problem(module: Any, ranges: Mapping[str, Observer]) -> str | None:
    """Why int8 cannot take a layer with these ranges."""
    if ranges["input"].low == ranges["input"].high == 0:
        return "its inputs were all zero"
    if isinstance(module, SharpEcoAttention):
        cancel = float(ranges["values"].peaks.amax()) > _MOST_TIMES * ranges["output"].largest()  # type: ignore[union-attr]
        return "its outputs are tiny next to its values" if cancel else None
    if math.prod(module.weight.shape[1:]) > MOST_INPUTS:
        return f"it adds up more than {MOST_INPUTS:,} products, which may not fit in 32 bits"
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return f"padding {module.padding_mode!r}, {module.padding!r}"
    return None


def _measure(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    made: Mapping[str, Integer],
    batches: list[Any],
    forward: Forward,
    tick: Callable[[], None],
) -> dict[str, tuple[float, float]]:
    """The error of each integer layer on the inputs of the original, and the share of inputs cut off."""
    errors: dict[str, list[float]] = {name: [] for name in made}
    cut: dict[str, list[float]] = {name: [] for name in made}

    def compare(name: str, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        x, grid = _input(args, kwargs), _input_grid(made[name])
        if x.numel() == 0:
            return
        low, high = ((end - grid.zero) * grid.scale for end in (LOWEST - 0.5, HIGHEST + 0.5))
        cut[name].append(float(((x < low) | (x > high)).float().mean()))
        errors[name].append(float(relative_mse(made[name](*args, **kwargs).float(), out.float())))

    with ExitStack() as stack:
        for name in made:
            hook: Any = partial(compare, name)
            stack.callback(found[name].register_forward_hook(hook, with_kwargs=True).remove)
        _run_all(model, batches, forward, tick)
    return {name: (_mean(errors[name]), _mean(cut[name])) for name in made}


def _input(args: Any, kwargs: Any) -> Any:
    """The first argument of a layer, by position or by name: `input` in PyTorch, `x` in ours."""
    return args[0] if args else kwargs["input" if "input" in kwargs else "x"]


def _run_all(model: nn.Module, batches: list[Any], forward: Forward, tick: Callable[[], None]) -> None:
    device = next((x.device for x in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    for batch in batches:
        forward(model, move(batch, device))
        tick()


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


def _input_grid(layer: Integer) -> Grid:
    holder = layer.projection if isinstance(layer, IntegerAttention) else layer
    return holder._grids["input"]


def _megabytes(model: nn.Module) -> float:
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return sum(x.nbytes for x in tensors.values()) / 1e6
