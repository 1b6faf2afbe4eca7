"""The `ecoformer` command. This module imports nothing heavy, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import signal


def main() -> None:
    """Run a command; while Python imports PyTorch, Ctrl-C ends the process without a traceback."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ecoformer.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()
