"""Writing files: replaced completely or not at all, and never written through a link."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".ecoformer-*.tmp"
"""Names of files that are being written; a killed process leaves one behind."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new, empty file beside `path`, which takes the place of `path` when the block succeeds.

    The new file has a random name and is created exclusively. A link at `path` is replaced, not followed. An
    existing file keeps its permissions, a new one follows the umask. After an error nothing is left.
    """
    temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        with suppress(FileNotFoundError):
            existing = os.lstat(path).st_mode
            mode = existing if stat.S_ISREG(existing) else mode
        yield temporary
        os.chmod(temporary, stat.S_IMODE(mode) & 0o777)
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
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise OSError(f"{path} is a link, which is not written through: replace it by a regular file")
    with os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file: remove it")
        file.write(text)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
