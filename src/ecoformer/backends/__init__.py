"""Implementations of hashed attention.

`eager.py` is plain PyTorch and runs everywhere; `fused.py` says what a fused backend is, from tokens to
output; `choice.py` chooses one; `cpu/` and `triton/` are two.
"""

from ecoformer.backends.choice import available

__all__ = ["available"]
