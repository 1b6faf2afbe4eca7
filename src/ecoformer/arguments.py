"""Words for error messages: a tensor's shape, and an error in one line."""

from __future__ import annotations

from torch import Tensor


def shape(x: Tensor) -> str:
    """A tensor's shape as error messages show it."""
    return str(tuple(x.shape))


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's message in one line of about `limit` characters, or its class where it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else f"{line[:limit]} ..."
