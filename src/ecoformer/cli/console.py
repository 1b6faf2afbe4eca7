"""The console for tables."""

from __future__ import annotations

from rich.console import Console


def plain_console() -> Console:
    """A console that prints brackets in names as they are, and long lines in a pipe."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=200)
