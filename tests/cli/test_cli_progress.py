"""Signs of life on stderr where it is not a terminal."""

import time

from ecoformer.cli import common


def test_a_pipe_gets_lines(capsys, monkeypatch):
    monkeypatch.setattr(common, "FIRST_SECONDS", 0.01)
    with common.progress() as show:
        show("counting")
        show("counting [more]")
        deadline = time.monotonic() + 10
        err = ""
        while not err and time.monotonic() < deadline:
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert err == "counting [more]\n"


def test_what_is_quick_or_for_machines_says_nothing(capsys, monkeypatch):
    with common.progress() as show:
        show("counting")
    monkeypatch.setattr(common, "FIRST_SECONDS", 0.001)
    with common.progress(as_json=True) as show:
        show("counting")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
