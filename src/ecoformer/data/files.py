"""Find and read the files of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ecoformer.arguments import one_line

if TYPE_CHECKING:
    from PIL import Image

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # some data sets hold GIFs named .jpg


def find_files(folder: Path, endings: str | tuple[str, ...], *, deep: bool = False) -> list[str]:
    """Sorted paths of files with these endings in a folder, or below it too; hidden ones are left out."""

    def fail(error: OSError) -> None:
        raise error

    found: list[str] = []
    for place, _, names in os.walk(folder, onerror=fail) if folder.is_dir() else ():
        names = [name for name in names if name.lower().endswith(endings) and not name.startswith(".")]
        found += [os.path.join(place, name) for name in names]
        if not deep:
            break
    return sorted(found)


def read_files(paths: Iterable[str], most: int = -1) -> list[bytes]:
    """The first `most` bytes of each file, or all; reads several at once, which helps on network disks."""

    def read(path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read(most)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(read, paths, chunksize=256))


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """A picture as RGB; Pillow tries common formats only, whatever the name says, and bounds their size."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=_FORMATS) as picture:
            return picture.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # damaged files fail in more ways than Pillow has classes for
        why = "" if isinstance(error, UnidentifiedImageError) else f": {one_line(error)}"
        raise ValueError(f"{os.fspath(path)} is not a readable {', '.join(_FORMATS)}{why}") from error
