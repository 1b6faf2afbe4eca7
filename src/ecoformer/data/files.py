"""Find, open and decode untrusted files.

A folder may hold loops of links, pipes and devices, and a small file may decode to gigabytes.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ecoformer.arguments import one_line

if TYPE_CHECKING:
    from PIL import Image

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # some data sets hold GIFs named .jpg
_MOST_IMAGE_BYTES = 2**28
_MOST_PIXELS = 89_478_485  # where Pillow starts to warn of decompression bombs


def find_files(folder: Path, endings: str | tuple[str, ...], *, deep: bool = False) -> list[str]:
    """Sorted paths of the files in a folder with one of these endings, hidden ones left out.

    Links to files are followed. Links to folders are not, so a loop of links ends.

    Args:
        folder: has no files if it does not exist.
        endings: of file names, in lower case.
        deep: include the folders below.
    """
    found: list[str] = []
    folders = [os.fspath(folder)] if folder.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    if deep and not entry.is_symlink():
                        folders.append(entry.path)
                elif entry.name.lower().endswith(endings) and not entry.name.startswith("."):
                    if not entry.is_file():
                        raise ValueError(_not_regular(entry.path))
                    found.append(entry.path)
    return sorted(found)


def open_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file, unbuffered. Reading a pipe could wait forever, and a device may never end."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(_not_regular(path))
    return file


def read_files(paths: Iterable[str], most: int = -1) -> list[bytes]:
    """The first `most` bytes of each file, or all; reads several at once, which helps on network disks."""

    def read(path: str) -> bytes:
        with open_file(path) as file:
            return file.read(most)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(read, paths, chunksize=256))


def _not_regular(path: str | os.PathLike[str]) -> str:
    return f"{os.fspath(path)!r} is a pipe, a device or a broken link, not a regular file: remove it"


def read_image(path: str | os.PathLike[str], span: tuple[int, int] | None = None) -> Image.Image:
    """A picture as RGB, from a file or from bytes within it.

    Only common formats are tried, whatever the name says: Pillow runs Ghostscript on some others.

    Args:
        path: the file.
        span: the picture's first byte and size; default: the complete file.
    """
    from PIL import Image, UnidentifiedImageError

    with open_file(path) as file:
        start, size = span or (0, os.fstat(file.fileno()).st_size)
        if size > _MOST_IMAGE_BYTES:
            raise ValueError(f"the picture has {size:,} bytes, more than {_MOST_IMAGE_BYTES:,}")
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"the picture is cut short, it has {len(data):,} of {size:,} bytes")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are more than {_MOST_PIXELS:,}")
            return picture.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # damaged files fail in more ways than Pillow has classes for
        # Pillow's own words name the bytes in memory, not the file.
        why = "" if isinstance(error, UnidentifiedImageError) else f": {one_line(error)}"
        raise ValueError(f"the picture is not a readable {', '.join(_FORMATS)}{why}") from error
