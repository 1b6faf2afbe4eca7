"""Models as ONNX files: standard operators only, with open sizes where the model permits it, and checked."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from ecoformer.arguments import one_line
from ecoformer.files import replacing
from ecoformer.ops.exported import decompositions
from ecoformer.quantization import integer_layers
from ecoformer.quantization.layers import HasGrids
from ecoformer.running import NOT_TAKEN, eval_mode, not_taken
from ecoformer.third_party import import_library

OPSET = 20
"""The first with Gelu as one operator."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_ERROR = 0.01
"""Over the outputs' root mean square. Rounding may flip a bit of a code, so 1e-6 would be too strict."""
_LARGEST_INTEGER_ERROR = 0.1
"""The same for quantised models, where rounding to int8 may go either way in every layer."""
_AXES = {2: {1: "tokens"}, 3: {1: "tokens"}, 4: {2: "height", 3: "width"}}
"""Sizes that may be open, by the number of dimensions of an input: texts, embedded texts, images."""

Inputs = Mapping[str, Tensor]
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class OnnxExport:
    """An ONNX file and how it compares with the model; sizes of inputs and outputs are numbers or names."""

    path: Path
    opset: int
    bytes: int
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    operators: dict[str, int]
    """How often each operator occurs."""
    checked: int
    """Batches that ONNX Runtime and PyTorch both computed."""
    error: float
    """The largest difference of an output."""
    relative_error: float
    """The differences' root mean square over that of the outputs."""
    same_top1: float | None
    """The share of samples with the same largest logit; None where no output has the shape (B, classes)."""
    fixed: dict[str, str]
    """Sizes that are not open, and why."""

    def __str__(self) -> str:
        top1 = "" if self.same_top1 is None else f", same top-1 for {self.same_top1:.0%}"
        lines = [f"{self.path}: {self.bytes / 1e6:.1f} MB, opset {self.opset}, standard operators only"]
        for kind, shapes in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {kind} {name} ({', '.join(map(str, s))})" for name, s in shapes.items()]
        lines += [f"  fixed: {size}, because {reason}" for size, reason in self.fixed.items()]
        lines.append(
            f"  ONNX Runtime against PyTorch on {self.checked} batches: largest error {self.error:.1e}, "
            f"relative {self.relative_error:.1e}{top1}"
        )
        return "\n".join(lines)


def export_onnx(
    model: nn.Module,
    path: str | Path,
    example: Tensor | Inputs,
    *,
    samples: Iterable[Tensor | Inputs] = (),
    opset: int = OPSET,
) -> OnnxExport:
    """Write a model to an ONNX file for inference, and compare it with PyTorch in ONNX Runtime.

    The batch, the height and width of images and the length of texts are open where the model permits it. The
    file holds standard operators only, so any runtime with the opset can run it.

    Args:
        model: any model; hashed attention is exported in its form for inference. Mode and device are kept.
        path: the file to write; it appears complete and checked, or not at all.
        example: an input: images (B, C, H, W), token ids (B, N), or keyword arguments of `forward`.
        samples: further inputs to compare on, such as real images.
        opset: version of ONNX's operators.

    Raises:
        ValueError: if the model cannot be exported, or computes something else in ONNX Runtime.
        ModuleNotFoundError: if a package is missing: `pip install 'ecoformer[onnx]'`.
    """
    for package in _PACKAGES:
        import_library(package)
    path = Path(path)
    for module in model.modules():
        if isinstance(module, HasGrids):
            module.remember_grids()
    inputs = _with_two(_named(example, model))
    if any(x.dtype == torch.bfloat16 for x in (*inputs.values(), *model.parameters(), *model.buffers())):
        raise ValueError(
            f"{type(model).__name__} computes in bfloat16, which ONNX Runtime cannot on CPUs: export "
            "model.float() with inputs in float32"
        )
    with eval_mode(model), torch.no_grad(), _quiet():
        reference = _run(model, inputs, example)
        others, fixed = _other_sizes(model, inputs)
        program, fixed = _program(model, inputs, reference, fixed, opset)
        with replacing(path) as temporary:
            program.save(str(temporary), external_data=False)
            if others and not fixed and not _agree(model, temporary, others):
                # Branches on sizes are decided when a model is recorded.
                fixed = {_size_names(inputs): "the model computes other sizes in another way"}
                program, fixed = _program(model, inputs, reference, fixed, opset)
                program.save(str(temporary), external_data=False)
            operators = _operators(program.model)
            single = {name: x[:1] for name, x in inputs.items()}
            batches = [inputs, single, *others, *(_named(x, model) for x in samples)]
            if fixed:
                sizes = {name: x.shape[1:] for name, x in inputs.items()}
                batches = [b for b in batches if {name: x.shape[1:] for name, x in b.items()} == sizes]
            compared = _compare(model, temporary, batches)
            size = temporary.stat().st_size
    graph = program.model.graph
    return OnnxExport(
        path=path,
        opset=program.model.opset_imports[""],
        bytes=size,
        inputs={value.name: _shape(value) for value in graph.inputs},
        outputs={value.name: _shape(value) for value in graph.outputs},
        operators=operators,
        fixed=fixed,
        **compared,
    )


def _named(example: Tensor | Inputs, model: nn.Module) -> dict[str, Tensor]:
    """Inputs by name: as given, or what a model of transformers calls its input, or what it looks like."""
    if isinstance(example, Tensor):
        name = "images" if example.is_floating_point() else "input_ids"
        return {getattr(model, "main_input_name", name): example}
    if not example or not all(isinstance(x, Tensor) and x.ndim for x in example.values()):
        raise ValueError(f"example must be a tensor or named tensors with a batch, got {list(example)}")
    return dict(example)


def _with_two(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """At least two samples: `torch.export` takes a size of one for a constant."""
    return {name: torch.cat([x, x]) if len(x) == 1 else x for name, x in inputs.items()}


def _call(model: nn.Module, inputs: Inputs) -> Any:
    return model(next(iter(inputs.values()))) if _positional(model, inputs) else model(**inputs)


def _positional(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a single tensor is passed by position, because its name here is ours."""
    return len(inputs) == 1 and "main_input_name" not in dir(model)


def _run(model: nn.Module, inputs: Inputs, example: Any) -> dict[str, Tensor]:
    try:
        return _outputs(_call(model, inputs))
    except NOT_TAKEN as error:
        raise not_taken(model, example, error) from error


def _outputs(found: Any) -> dict[str, Tensor]:
    """The outputs by name; a single one is `logits` where it looks like that."""
    if isinstance(found, Tensor):
        return {"logits" if found.ndim == 2 else "output": found}
    items = found.items() if isinstance(found, Mapping) else ((f"output_{i}", x) for i, x in enumerate(found))
    named = {str(name): x for name, x in items if x is not None}
    if not named or not all(isinstance(x, Tensor) for x in named.values()):
        raise ValueError(f"the model must return tensors, got {', '.join(named) or type(found).__name__}")
    return named


def _other_sizes(model: nn.Module, inputs: Inputs) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    """Inputs of another size, where the model takes them, and why it does not otherwise."""
    other = {}
    for name, x in inputs.items():
        other[name] = x[:, : (x.shape[1] + 1) // 2] if x.ndim in (2, 3) else x
        if x.ndim == 4:
            height, width = x.shape[2:]
            other[name] = F.interpolate(x, size=(height + 32, width + 64))
    if not _size_names(inputs):
        return [], {}
    try:
        _call(model, other)
    except NOT_TAKEN as error:
        reason = f"the model takes no other ({one_line(error, 120)})"
        return [], {_size_names(inputs): reason}
    return [other], {}


def _size_names(inputs: Inputs) -> str:
    return ", ".join(sorted({name for x in inputs.values() for name in _AXES.get(x.ndim, {}).values()}))


def _agree(model: nn.Module, path: Path, batches: Iterable[Inputs]) -> bool:
    try:
        _compare(model, path, batches)
    except Exception:  # ONNX Runtime has many of its own
        return False
    return True


def _program(
    model: nn.Module, inputs: Inputs, outputs: Inputs, fixed: dict[str, str], opset: int
) -> tuple[Any, dict[str, str]]:
    """The ONNX program; with fixed sizes, except the batch, where open ones cannot be exported."""

    def export(sizes: bool) -> Any:
        shapes = {name: {0: "batch"} | (_AXES.get(x.ndim, {}) if sizes else {}) for name, x in inputs.items()}
        positional = _positional(model, inputs)
        sizes_by_name = tuple(shapes.values()) if positional else shapes
        open_sizes = tree_map_only(str, lambda _: torch.export.Dim.DYNAMIC, sizes_by_name)
        recorded = torch.export.export(
            model,
            tuple(inputs.values()) if positional else (),
            {} if positional else dict(inputs),
            dynamic_shapes=open_sizes,
            strict=False,
        )
        program: Any = torch.onnx.export(
            recorded.run_decompositions(decompositions()),
            dynamic_shapes=sizes_by_name,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
        program.model = _rewritten(program.model)
        return program

    what = f"{type(model).__name__} cannot be exported to ONNX"
    try:
        return export(sizes=not fixed), fixed
    except Exception as error:
        if fixed:
            raise ValueError(f"{what}: {_reason(error)}") from error
        reason = f"open sizes cannot be exported ({_reason(error)})"
    try:
        return export(sizes=False), {_size_names(inputs): reason}
    except Exception as error:
        raise ValueError(f"{what}: {_reason(error)}") from error


def _rewritten(model: Any) -> Any:
    """The graph in a form that ONNX Runtime computes faster on CPUs, with the same results."""
    rule = import_library("onnxscript.rewriter.pattern").RewriteRule
    rules = [
        rule(_to_maps, _to_maps_channels_last, _same_tokens),
        rule(_to_tokens, _to_tokens_channels_last, _same_tokens),
        rule(_sum_of_two, _sum_of_any, _only_normalized),
    ]
    return import_library("onnxscript.rewriter").rewrite(model, rules)


# Tokens (B, N, C) become maps (B, C, H, W) by a transpose and a reshape. With the reshape first, the
# transpose cancels against those that ONNX Runtime puts around int8 convolutions, which want channels last.
# Likewise from maps to tokens.


def _to_maps(op: Any, tokens: Any, shape: Any) -> Any:
    flat = op.Transpose(tokens, perm=[0, 2, 1], _outputs=["flat"])
    return op.Reshape(flat, shape, allowzero=1, _outputs=["maps"])


def _to_maps_channels_last(op: Any, tokens: Any, shape: Any, **_: Any) -> Any:
    return op.Transpose(_reshaped(op, tokens, shape, [0, 2, 3, 1]), perm=[0, 3, 1, 2])


def _to_tokens(op: Any, maps: Any, shape: Any) -> Any:
    return op.Transpose(op.Reshape(maps, shape, allowzero=1, _outputs=["flat"]), perm=[0, 2, 1])


def _to_tokens_channels_last(op: Any, maps: Any, shape: Any, **_: Any) -> Any:
    return _reshaped(op, op.Transpose(maps, perm=[0, 2, 3, 1]), shape, [0, 2, 1])


def _reshaped(op: Any, x: Any, shape: Any, order: list[int]) -> Any:
    return op.Reshape(x, op.Gather(shape, op.Constant(value_ints=order)), allowzero=1)


def _same_tokens(context: Any, flat: Any, maps: Any, **_: Any) -> bool:
    """Whether (B, C, N) and (B, C, H, W) have the same batch and channels."""
    if flat.shape is None or maps.shape is None or len(flat.shape) != 3 or len(maps.shape) != 4:
        return False
    known = isinstance(maps.shape[1], int) and not maps.shape.is_unknown_dim(0)
    return known and tuple(flat.shape)[:2] == tuple(maps.shape)[:2]


# ONNX Runtime fuses Add and LayerNormalization to SkipLayerNormalization, which takes four to seven times as
# long on CPUs (as of 1.31). It does not do so for Sum.


def _sum_of_two(op: Any, x: Any, y: Any) -> Any:
    return op.Add(x, y, _outputs=["total"])


def _sum_of_any(op: Any, x: Any, y: Any, **_: Any) -> Any:
    return op.Sum(x, y)


def _only_normalized(context: Any, total: Any, **_: Any) -> bool:
    return {node.op_type for node, _ in total.uses()} == {"LayerNormalization"}


def _reason(error: BaseException) -> str:
    """The exporter wraps the error that says what is wrong in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error, 200)


def _operators(model: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    foreign = set()
    for node in model.graph.all_nodes():
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
        if node.domain not in ("", "ai.onnx"):
            foreign.add(f"{node.domain}.{node.op_type}")
    if foreign:
        raise ValueError(
            f"the exported model needs operators that are not standard: {', '.join(sorted(foreign))}"
        )
    return dict(sorted(counts.items()))


def _shape(value: Any) -> Shape:
    return tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)


def _compare(model: nn.Module, path: Path, batches: Iterable[Inputs]) -> dict[str, Any]:
    """Errors of ONNX Runtime against PyTorch; raises where the file computes something else."""
    onnxruntime = import_library("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, not printed
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = [value.name for value in session.get_inputs()]
    largest = square = total = 0.0
    checked = samples = same = 0
    for batch in batches:
        outputs = _outputs(_call(model, batch))
        found = session.run(list(outputs), {name: batch[name].cpu().numpy() for name in taken})
        for ours, theirs in zip(found, outputs.values(), strict=True):
            expected = theirs.detach().cpu().double()
            difference = torch.from_numpy(ours).double() - expected
            largest = max(largest, float(difference.abs().max()))
            square, total = square + float(difference.square().sum()), total + float(expected.square().sum())
            if expected.ndim == 2 and expected.shape[1] > 1:
                top = torch.from_numpy(ours).argmax(dim=1) == expected.argmax(dim=1)
                same, samples = same + int(top.sum()), samples + len(top)
        checked += 1
    relative = math.sqrt(square / total) if total else math.sqrt(square)
    if not relative <= (_LARGEST_INTEGER_ERROR if integer_layers(model) else _LARGEST_ERROR):
        raise ValueError(
            f"ONNX Runtime computes something else than PyTorch: largest error {largest:.1e}, relative "
            f"{relative:.1e}; nothing was written"
        )
    top1 = same / samples if samples else None
    return {"checked": checked, "error": largest, "relative_error": relative, "same_top1": top1}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on its own progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
