"""Energy-saving attention with linear complexity for PyTorch."""

from ecoformer.accounting import Ledger, Plan, cost, plan
from ecoformer.attention import (
    Attention,
    EcoAttention,
    create_attention,
    list_attentions,
    register_attention,
)
from ecoformer.checkpoints import CheckpointError, load, load_official, save
from ecoformer.conversion import (
    Conversion,
    Distillation,
    Projections,
    Transfer,
    convert,
    distill,
    register_conversion,
    transfer,
)
from ecoformer.export import OnnxExport, export_onnx
from ecoformer.hashing import (
    FitOptions,
    Hasher,
    KernelHasher,
    KlshHasher,
    LshHasher,
    RefitHashers,
    SignHasher,
    fit_hashers,
    fitting,
    hashers_of,
)
from ecoformer.ops.eager import pack_codes, unpack_codes
from ecoformer.ops.hash_attention import hash_attention, use_kernels
from ecoformer.quantization import Quantization, quantize

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CheckpointError",
    "Conversion",
    "Distillation",
    "EcoAttention",
    "FitOptions",
    "Hasher",
    "KernelHasher",
    "KlshHasher",
    "Ledger",
    "LshHasher",
    "OnnxExport",
    "Plan",
    "Projections",
    "Quantization",
    "RefitHashers",
    "SignHasher",
    "Transfer",
    "convert",
    "cost",
    "create_attention",
    "distill",
    "export_onnx",
    "fit_hashers",
    "fitting",
    "hash_attention",
    "hashers_of",
    "list_attentions",
    "load",
    "load_official",
    "pack_codes",
    "plan",
    "quantize",
    "register_attention",
    "register_conversion",
    "save",
    "transfer",
    "unpack_codes",
    "use_kernels",
]
