"""Hashers: tokens to short binary codes, and how they learn."""

from ecoformer.hashing.base import Hasher
from ecoformer.hashing.fitting import RefitHashers, fit_hashers, fitting, hashers_of
from ecoformer.hashing.kernel import KernelHasher, KlshHasher
from ecoformer.hashing.simple import LshHasher, SignHasher
from ecoformer.hashing.solver import FitOptions

__all__ = [
    "FitOptions",
    "Hasher",
    "KernelHasher",
    "KlshHasher",
    "LshHasher",
    "RefitHashers",
    "SignHasher",
    "fit_hashers",
    "fitting",
    "hashers_of",
]
