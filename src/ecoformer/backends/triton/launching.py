"""Launching a kernel again without Triton's binder.

The binder looks at every argument of every launch to find the code that was compiled for it: about 0.1 ms for
sixty of them, longer than many kernels run. Here the code is kept by all that it may have been compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ecoformer.backends.triton.hashing import INTERPRETED

_DIRECT = not INTERPRETED.value
"""The interpreter has no compiled code."""
_MOST = 4096
"""Launches that are kept for a kernel; lengths that never come back must not fill the memory."""


class Kernel:
    """A function under `triton.jit`, launched in the same way, `kernel[(programs,)](...)`.

    Compile-time constants and launch options must go in by name, everything else by position.
    """

    def __init__(self, function: Any, direct: bool = _DIRECT) -> None:
        self.function, self.direct = function, direct
        self._known: dict[Any, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        launch: Callable[..., Any] = partial(self._launch, grid) if self.direct else self.function[grid]
        return launch

    def _launch(self, grid: tuple[int], *arguments: Any, **named: Any) -> None:
        # Code is compiled for a device, dtypes, pointers that 16 divides or not, and properties of numbers:
        # the numbers themselves tell more than enough.
        key = (
            arguments[0].get_device(),
            *[(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in arguments],
            *named.items(),
        )
        known = self._known.get(key)
        if known is not None:
            compiled, constants = known
            compiled[(*grid, 1, 1)](*arguments, *constants)
            return
        compiled = self.function[grid](*arguments, **named)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = compiled, [named[name] for name in self.function.arg_names[len(arguments) :]]
