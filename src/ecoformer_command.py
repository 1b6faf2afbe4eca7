"""The `ecoformer` command. This module imports nothing heavy, so that it answers from the start."""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Run a command; while Python imports PyTorch, Ctrl-C ends the process without a traceback.

    If that takes long and nobody watches a terminal, one line on stderr says so.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    starting = threading.Timer(1.0, os.write, (2, b"ecoformer: importing PyTorch\n"))
    starting.daemon = True
    if not os.isatty(2) and not {"--json", "--help", "--version"} & set(sys.argv):
        starting.start()
    from ecoformer.cli import main as run

    starting.cancel()
    signal.signal(signal.SIGINT, handler)
    run()
