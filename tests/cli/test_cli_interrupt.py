"""Ctrl-C before the command has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ecoformer_command
import pytest


def test_ctrl_c_while_torch_is_imported_prints_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
    )
    source = Path(ecoformer_command.__file__).parent
    found = subprocess.run(
        [sys.executable, "-c", "import ecoformer_command; ecoformer_command.main()", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


def test_a_slow_import_gives_a_sign_of_life(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1.5)\nraise SystemExit\n")
    source = Path(ecoformer_command.__file__).parent
    for arguments, lines in (([], 1), (["--json"], 0)):
        found = subprocess.run(
            [sys.executable, "-c", "import ecoformer_command; ecoformer_command.main()", "info", *arguments],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (found.stdout, found.stderr.count("\n")) == ("", lines)


def test_later_commands_can_be_interrupted_as_always(monkeypatch):
    monkeypatch.setattr("ecoformer.cli.main", lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    try:
        with pytest.raises(KeyboardInterrupt):
            ecoformer_command.main()
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
