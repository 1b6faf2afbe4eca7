"""Energy-saving attention with linear complexity for PyTorch."""

from ecoformer.functional import hash_attention, pack_codes, sign_ste, unpack_codes
from ecoformer.streaming import HashAttentionState

__version__ = "0.1.0"
