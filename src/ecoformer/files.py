"""Writing files: replaced completely or not at all, and never written through a link."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".ecoformer-*.tmp"
"""Names of files that are being written; a killed process leaves one behind."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new, empty file beside `path`, which takes the place of `path` when the block succeeds.

    A link at `path` is replaced, not followed. An existing file keeps its permissions, a new one follows the
    umask. After an error nothing is left.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}: create it first")
    if path.exists() and not path.is_file():
        raise IsADirectoryError(f"{path} is a folder or a device: pass the path of a regular file")
    temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        kept = path.is_file() and not path.is_symlink()
        mode = os.stat(path).st_mode if kept else os.fstat(descriptor).st_mode
        os.close(descriptor)
        yield temporary
        os.chmod(temporary, mode & 0o777)
        to_disk(temporary)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    with suppress(OSError):  # some systems cannot sync a folder
        to_disk(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """Add text to the end of a regular file, which is created if need be; links are refused."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(f"{path} is a link or no regular file, which is not written to: remove it")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o666)
    with open(descriptor, "a", encoding="utf-8") as file:
        file.write(text)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
