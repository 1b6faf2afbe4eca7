"""Where tables go."""

from __future__ import annotations

from rich.console import Console


def plain_console() -> Console:
    """Names may hold brackets, which are no markup; in a pipe there is no edge to break lines at."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=200)
