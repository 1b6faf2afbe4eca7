"""Energy-saving attention with linear complexity for PyTorch."""

from ecoformer.attention import (
    Attention,
    EcoAttention,
    create_attention,
    list_attentions,
    register_attention,
)
from ecoformer.functional import hash_attention, pack_codes, sign_ste, unpack_codes
from ecoformer.hashing import (
    FitOptions,
    Hasher,
    HashQuality,
    KernelHasher,
    KlshHasher,
    LshHasher,
    RefitHashers,
    SignHasher,
    UnfittedHasherError,
    fit_hashers,
    fitting,
    hashers_of,
)
from ecoformer.streaming import HashAttentionState

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "EcoAttention",
    "FitOptions",
    "HashAttentionState",
    "HashQuality",
    "Hasher",
    "KernelHasher",
    "KlshHasher",
    "LshHasher",
    "RefitHashers",
    "SignHasher",
    "UnfittedHasherError",
    "create_attention",
    "fit_hashers",
    "fitting",
    "hash_attention",
    "hashers_of",
    "list_attentions",
    "pack_codes",
    "register_attention",
    "sign_ste",
    "unpack_codes",
]
