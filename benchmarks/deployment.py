"""PVTv2-B0 in ONNX Runtime, in fp32 and in int8: size, latency and errors against PyTorch.

    python benchmarks/deployment.py [--seconds 5] [--sizes 224 512 1024] [--texts FOLDER]

Native, softmax, eco and sharp_eco are exported by `export_onnx` in fp32, and once more after
`ecoformer.quantize`. "native, by ONNX Runtime" is the native model quantised by onnxruntime's own
`quantize_static` (QDQ, per channel), which also covers the products of attention. All are calibrated on the
same photographs. Weights are random; speed does not depend on them. Softmax in int8 is timed at 224 pixels
only. `--texts` also exports a BERT-like model and compares it on sentences of our README.

Times are medians of `torch.utils.benchmark`. Every exported model is compared with PyTorch first. Writes
results/deployment.json and results/deployment_int8.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attention import median_ms
from record import write_result
from torch import Tensor, nn

from ecoformer import OnnxExport, convert, export_onnx, quantize
from ecoformer.third_party import import_library, import_timm

NAMES = ("native", "softmax", "eco", "sharp_eco")
OWN = "native, by ONNX Runtime"
START = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
session.run(None, {"images": numpy.zeros((1, 3, 224, 224), numpy.float32)})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="for each model and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="folder of a BERT-like model with its tokeniser")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    checks, latency, sizes, files = [], [], {}, {}
    with TemporaryDirectory() as folder:
        for name in NAMES:
            for numbers in ("fp32", "int8"):
                label = f"{name}, {numbers}"
                print("exporting", label, flush=True)
                files[label] = Path(folder) / f"{label}.onnx"
                row = exported(name, numbers, files[label])
                checks.append({"model": "pvt_v2_b0", "attention": name, "numbers": numbers} | row)
                if numbers == "fp32":
                    sizes[name] = row["bytes"]
        files[OWN] = Path(folder) / "own.onnx"
        by_onnxruntime(files[OWN])
        if options.texts is not None:
            checks += [texts(options.texts, name, Path(folder) / "texts.onnx") for name in NAMES]
        for size in options.sizes:
            timed = [label for label in files if size <= 224 or label != "softmax, int8"]
            ms = {label: onnx_ms(files[label], crops(size)[:1], options) for label in timed}
            latency.append({"size": size, "median_ms": ms})
            print(latency[-1], flush=True)
        started = [start_up(files["sharp_eco, fp32"]) for _ in range(3)]
    rows = [
        {
            "runtime": "ONNX Runtime",
            "size": row["size"],
            "median_ms": {name: row["median_ms"][f"{name}, fp32"] for name in NAMES},
        }
        for row in latency
    ]
    about = {"threads": options.threads, "checks": checks}
    write_result("deployment", about | {"sizes": sizes, "latency": rows, "start_up_s": started})
    for row in latency:
        native = row["median_ms"]["native, int8"]
        row["speed"] = {f"{label} over native, int8": native / ms for label, ms in row["median_ms"].items()}
        del row["speed"]["native, int8 over native, int8"]
    write_result("deployment_int8", about | {"latency": latency})


def pvt() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = import_timm().create_model("pvt_v2_b0").eval()
    return model


def exported(name: str, numbers: str, file: Path) -> dict[str, Any]:
    """Export the model with this attention, and say how it does on photographs."""
    model, images = pvt(), crops(224)
    if name != "native":
        convert(model, name)
    if numbers == "int8":
        quantize(model, [images], max_error=1.0, progress=False)
    return facts(export_onnx(model, file, images[:2], samples=[images]))


def facts(made: OnnxExport) -> dict[str, Any]:
    return {key: getattr(made, key) for key in ("checked", "error", "relative_error", "same_top1", "bytes")}


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


class Reader:
    """Calibration data as onnxruntime reads them."""

    def __init__(self, images: Tensor) -> None:
        self._left = iter(torch.split(images, 1))

    def get_next(self) -> dict[str, Any] | None:
        images = next(self._left, None)
        return None if images is None else {"images": images.numpy()}


def by_onnxruntime(target: Path) -> None:
    """The native model by onnxruntime's static quantisation."""
    plain, shaped = target.with_suffix(".plain.onnx"), target.with_suffix(".shaped.onnx")
    given: dict[str, Any] = {"input_names": ["images"], "dynamo": True, "external_data": False}
    free = ({0: "batch", 2: "height", 3: "width"},)
    torch.onnx.export(pvt(), (crops(224)[:2],), plain, dynamic_shapes=free, **given)
    tools = import_library("onnxruntime.quantization")
    prepare = import_library("onnxruntime.quantization.shape_inference").quant_pre_process
    prepare(plain, shaped, skip_symbolic_shape=True)
    types = {"activation_type": tools.QuantType.QUInt8, "weight_type": tools.QuantType.QInt8}
    tools.quantize_static(
        shaped, target, Reader(crops(224)), quant_format=tools.QuantFormat.QDQ, per_channel=True, **types
    )


def texts(source: Path, name: str, file: Path) -> dict[str, Any]:
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
    row = facts(export_onnx(model, file, batches[0], samples=batches))
    return {"model": str(model.config.model_type), "attention": name, "numbers": "fp32"} | row


def onnx_ms(file: Path, images: Tensor, options: argparse.Namespace) -> float:
    runtime = import_library("onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 3
    session = runtime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    inputs = {"images": images.numpy()}
    return median_ms(lambda: session.run(None, inputs), "cpu", options.seconds)


def start_up(file: Path) -> float:
    """Seconds from the start of Python to the first result."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", START, str(file)], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
