"""Energy-saving attention with linear complexity for PyTorch."""

from ecoformer.accounting import Ledger, Plan, cost, plan
from ecoformer.affinity import Affinity
from ecoformer.attention import (
    Attention,
    EcoAttention,
    create_attention,
    list_attentions,
    register_attention,
)
from ecoformer.backends.choice import use_backend
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
from ecoformer.functional import eco_attention, hash_attention, pack_codes, sign_ste, unpack_codes
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
from ecoformer.quantization import Quantization, quantize
from ecoformer.streaming import HashAttentionState

__version__ = "0.1.0"

__all__ = [
    "Affinity",
    "Attention",
    "CheckpointError",
    "Conversion",
    "Distillation",
    "EcoAttention",
    "FitOptions",
    "HashAttentionState",
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
    "eco_attention",
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
    "sign_ste",
    "transfer",
    "unpack_codes",
    "use_backend",
]
