"""Exported models outside PyTorch: size, latency on two threads, and errors against PyTorch.

PVTv2-B0 as timm has it (native), and with softmax, eco and sharp_eco on every token, each exported by
`export_onnx`. ONNX Runtime is always measured, OpenVINO and ExecuTorch (XNNPACK) where they are installed.
Contestants take turns, because other work on the machine changes its speed. Weights are random; speed does
not depend on them. `--texts FOLDER` also exports a BERT-like model and compares it on sentences. `--vit` only
exports and compares ViT-S/16, into a result file of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import write_result
from torch import Tensor, nn

from ecoformer import OnnxExport, convert, export_onnx
from ecoformer.arguments import one_line
from ecoformer.third_party import import_library, import_timm

NAMES = ("native", "softmax", "eco", "sharp_eco")
THREADS = 2
Run = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of measuring, for each runtime and size")
    parser.add_argument("--texts", type=Path, help="folder of a BERT-like model with its tokeniser")
    parser.add_argument("--vit", action="store_true", help="only compare ViT-S/16 with PyTorch")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    if options.vit:
        with TemporaryDirectory() as folder:
            checks = [check_pictures("vit_small_patch16_224", name, Path(folder))[1] for name in NAMES]
        print("wrote", write_result("deployment_vit", {"checks": checks}))
        return
    figures: dict[str, Any] = {"threads": THREADS, "sizes": {}, "checks": [], "latency": [], "notes": {}}
    with TemporaryDirectory() as folder:
        models, files = {}, {}
        for name in NAMES:
            models[name], row = check_pictures("pvt_v2_b0", name, Path(folder))
            files[name] = Path(folder) / f"{name}.onnx"
            figures["sizes"][name] = row["bytes"]
            figures["checks"].append(row)
        if options.texts is not None:
            figures["checks"] += [check_texts(options.texts, name, Path(folder)) for name in NAMES]
        for runtime, prepare in RUNTIMES.items():
            for size in (224,) if prepare is executorch else (224, 512):  # it takes minutes to lower a model
                images = crops(size)[:1]
                runs: dict[str, Run] = {}
                for name in NAMES:
                    try:
                        runs[name], note = prepare(models[name], files[name], images)
                    except Exception as error:
                        note = f"not run: {one_line(error, 300)}"
                    if note:
                        figures["notes"].setdefault(runtime, {}).setdefault(str(size), {})[name] = note
                if runs:
                    times = in_turns(runs, options.seconds)
                    figures["latency"].append({"runtime": runtime, "size": size, **times})
                    print(runtime, size, times, flush=True)
        figures["start_up_s"] = start_up(files["sharp_eco"])
    print("wrote", write_result("deployment", figures))


def check_pictures(model_name: str, name: str, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model with this attention, exported to NAME.onnx, and how it does on photographs."""
    print("exporting", model_name, name, flush=True)
    torch.manual_seed(0)
    model: nn.Module = import_timm().create_model(model_name).eval()
    if name != "native":
        convert(model, name)
    images = crops(224)
    made = export_onnx(model, folder / f"{name}.onnx", images[:2], samples=[images])
    return model, check(model_name, name, made)


def crops(size: int) -> Tensor:
    """Eight crops of scikit-learn's two photographs, enlarged where need be."""
    pictures = import_library("sklearn.datasets").load_sample_images().images
    found = []
    for picture in pictures:
        x = torch.from_numpy(picture.copy()).permute(2, 0, 1).float().div(255)
        x = nn.functional.interpolate(x[None], scale_factor=max(1.0, 1.3 * size / min(x.shape[1:])))[0]
        down, right = x.shape[1] - size, x.shape[2] - size
        found += [x[:, i : i + size, j : j + size] for i in (0, down) for j in (0, right)]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.stack(found) - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def check(model: str, name: str, made: OnnxExport) -> dict[str, Any]:
    keys = ("checked", "error", "relative_error", "same_top1", "bytes", "opset")
    return {"model": model, "attention": name, **{key: getattr(made, key) for key in keys}}


def check_texts(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """On the sentences of our README, each padded with another."""
    transformers = import_library("transformers")
    model = transformers.AutoModel.from_pretrained(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if name != "native":
        convert(model, name)
    text = (Path(__file__).parent.parent / "README.md").read_text()
    sentences = re.findall(r"[A-Z][^.|`\n]{30,}\.", text)[:16]
    pairs = zip(sentences[::2], sentences[1::2], strict=False)
    batches = [dict(tokenizer(list(pair), padding=True, return_tensors="pt")) for pair in pairs]
    made = export_onnx(model, folder / f"texts_{name}.onnx", batches[0], samples=batches)
    return check(str(model.config.model_type), name, made)


def in_turns(
    runs: dict[str, Run], seconds: float, against: tuple[str, ...] = ("native", "softmax")
) -> dict[str, Any]:
    """Median and smallest milliseconds of each, and how many times as fast as those in `against` it is."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    rounds = list(zip(*times.values(), strict=True))
    order = list(times)
    speed = {
        f"{name} over {other}": median(row[order.index(other)] / row[order.index(name)] for row in rounds)
        for name in order
        for other in against
        if other in order and name != other
    }
    return {
        "rounds": len(rounds),
        "median_ms": {name: median(x) for name, x in times.items()},
        "min_ms": {name: min(x) for name, x in times.items()},
        "speed": speed,
    }


def onnxruntime(model: nn.Module, file: Path, images: Tensor) -> tuple[Run, str]:
    runtime = import_library("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    # Threads of the others must not keep waiting on the same cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    inputs = {"images": images.numpy()}
    return lambda: session.run(None, inputs), ""


def openvino(model: nn.Module, file: Path, images: Tensor) -> tuple[Run, str]:
    """Reads the ONNX file. The note names operators that its plugin computes by reference code."""
    runtime = import_library("openvino")
    core = runtime.Core()
    settings = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    read = core.read_model(file)
    read.reshape(list(images.shape))
    compiled = core.compile_model(read, "CPU", settings)
    request, x = compiled.create_infer_request(), images.numpy()
    found = torch.from_numpy(request.infer([x])[0])
    error = float((found - model(images).detach()).abs().max())
    about = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    plain = Counter(str(op["layerType"]) for op in about if str(op["primitiveType"]).startswith("ref"))
    note = f"largest error {error:.1e}; by reference code: " + (
        ", ".join(f"{n} {layer}" for layer, n in sorted(plain.items())) or "nothing"
    )
    return lambda: request.infer([x]), note


def executorch(model: nn.Module, file: Path, images: Tensor) -> tuple[Run, str]:
    """By `torch.export` and XNNPACK. The note says how many operators XNNPACK does not take, and which."""
    if find_spec("executorch") is None:
        raise ModuleNotFoundError("executorch is not installed", name="executorch")
    xnnpack = import_library("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    lower = import_library("executorch.exir").to_edge_transform_and_lower
    with torch.no_grad():
        program = torch.export.export(model, (images,))
        lowered = lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
    called = [str(n.target) for n in lowered.exported_program().graph.nodes if n.op == "call_function"]
    left = Counter(name for text in called for name in re.findall(r"aten\W+(\w+)", text)[:1])
    parts = sum("executorch_call_delegate" in text for text in called)
    runtime = import_library("executorch.runtime").Runtime.get()
    loaded = runtime.load_program(lowered.to_executorch().buffer)
    method = loaded.load_method("forward")
    error = float((method.execute([images])[0] - model(images).detach()).abs().max())
    named = ", ".join(f"{n} {op}" for op, n in left.most_common(8))
    outside = f"{sum(left.values())} operators outside: {named}"
    note = f"largest error {error:.1e}; {parts} parts by XNNPACK, {outside}"
    keep = (loaded, method)
    return lambda: keep[1].execute([images]), note


def start_up(file: Path) -> list[float]:
    """Seconds from the start of Python to the first result, three times."""
    script = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "session.run(None, {'images': numpy.zeros((1, 3, 224, 224), numpy.float32)})\n"
    )
    found = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", script, str(file)], check=True)
        found.append(time.perf_counter() - start)
    return found


RUNTIMES = {"ONNX Runtime": onnxruntime, "OpenVINO": openvino, "ExecuTorch": executorch}

if __name__ == "__main__":
    main()
