"""PVTv2-B0 in ONNX Runtime, in fp32 and in int8: latency on two threads, and errors against PyTorch.

    python benchmarks/deployment_int8.py [--seconds 20] [--sizes 224,512,1024]

Native, softmax, eco and sharp_eco are quantised by `ecoformer.quantize` and exported alike. "native, by ONNX
Runtime" is the native model in fp32, exported by `torch.onnx.export` and quantised by onnxruntime's own
`quantize_static` (QDQ, per channel), which also covers the products of attention. All are calibrated on the
same photographs and take turns.
Weights are random; speed does not depend on them. Softmax is timed at 224 pixels only: it is too slow beyond.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from deployment import NAMES, THREADS, check, crops, in_turns, onnxruntime
from record import write_result
from torch import Tensor

import ecoformer
from ecoformer.third_party import import_library, import_timm

OWN = "native, by ONNX Runtime"


class Reader:
    """Calibration data as onnxruntime reads them."""

    def __init__(self, images: Tensor) -> None:
        self._left = iter(torch.split(images, 1))

    def get_next(self) -> dict[str, Any] | None:
        images = next(self._left, None)
        return None if images is None else {"images": images.numpy()}


def by_onnxruntime(source: Path, target: Path) -> None:
    """onnxruntime's static quantisation of a file."""
    tools = import_library("onnxruntime.quantization")
    shaped = target.with_suffix(".shaped.onnx")
    import_library("onnxruntime.quantization.shape_inference").quant_pre_process(
        source, shaped, skip_symbolic_shape=True
    )
    tools.quantize_static(
        shaped,
        target,
        Reader(crops(224)),
        quant_format=tools.QuantFormat.QDQ,
        activation_type=tools.QuantType.QUInt8,
        weight_type=tools.QuantType.QInt8,
        per_channel=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of measuring, for each size")
    parser.add_argument("--sizes", default="224,512,1024")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    figures: dict[str, Any] = {"threads": THREADS, "checks": [], "latency": []}
    images = crops(224)
    with TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        plain = Path(folder) / "plain.onnx"
        for name in NAMES:
            torch.manual_seed(0)
            model = import_timm().create_model("pvt_v2_b0").eval()
            if name == "native":
                sizes = ({0: "batch", 2: "height", 3: "width"},)
                torch.onnx.export(
                    model,
                    (images[:2],),
                    plain,
                    input_names=["images"],
                    dynamic_shapes=sizes,
                    dynamo=True,
                    external_data=False,
                )
            else:
                ecoformer.convert(model, name)
            for numbers in ("fp32", "int8"):
                label = f"{name}, {numbers}"
                print("exporting", label, flush=True)
                if numbers == "int8":
                    ecoformer.quantize(model, [images], max_error=1.0, progress=False)
                files[label] = Path(folder) / f"{name}_{numbers}.onnx"
                made = ecoformer.export_onnx(model, files[label], images[:2], samples=[images])
                figures["checks"].append({"numbers": numbers} | check("pvt_v2_b0", name, made))
        files[OWN] = Path(folder) / "own.onnx"
        by_onnxruntime(plain, files[OWN])
        for size in map(int, options.sizes.split(",")):
            runs = {
                label: onnxruntime(torch.nn.Identity(), file, crops(size)[:1])[0]
                for label, file in files.items()
                if size <= 224 or not label.startswith("softmax")
            }
            times = in_turns(runs, options.seconds, against=("native, int8", "native, fp32", OWN))
            figures["latency"].append({"size": size, **times})
            print(size, times["median_ms"], times["speed"], flush=True)
    print("wrote", write_result("deployment_int8", figures))


if __name__ == "__main__":
    main()
