"""Files are replaced completely or not at all, and never written through links."""

from __future__ import annotations

import os
import stat

import pytest

from ecoformer import files


@pytest.mark.parametrize("target", ["target", "nothing"])
def test_a_link_is_replaced_and_its_target_stays(target, tmp_path):
    (tmp_path / "target").write_text("mine")
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / target)
    files.replace_text(link, "new")
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    assert not link.is_symlink()
    assert link.read_text() == "new"


def test_a_guessed_temporary_name_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "target").write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".ecoformer-guessed.tmp").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError, match=r"a\.txt"):
        files.replace_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "target").read_text() == "mine"


def test_after_an_error_everything_is_as_before(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        files.replace_text(file, "half \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert file.read_text() == "old"


def test_permissions(tmp_path):
    old = tmp_path / "old"
    old.write_text("x")
    old.chmod(0o600)
    umask = os.umask(0o027)
    try:
        for path in (old, tmp_path / "new"):
            files.replace_text(path, "y")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
def test_only_regular_files_are_appended_to(kind, tmp_path):
    (tmp_path / "target").write_text("mine")
    file = tmp_path / "log"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(tmp_path / ("target" if kind == "link" else "none"))
    with pytest.raises(OSError, match=r"log|No such device"):
        files.append_text(file, "line\n")
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "none").exists()


def test_appending(tmp_path):
    for line in ("one\n", "two\n"):
        files.append_text(tmp_path / "log", line)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
