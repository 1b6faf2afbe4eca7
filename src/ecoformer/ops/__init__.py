"""Hashed attention: one operator, and kernels for it."""
