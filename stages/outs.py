"""Outs appear whole or not at all: written beside their place, flushed to disk, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_out(path: Path, content: str | bytes) -> None:
    """Write one file and its parent folders. A reader sees the old content or the new, never half.

    The file is replaced and never rewritten in place: DVC may have linked the old one to its cache.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with half.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def out_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    try:
        yield half
        for file in half.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        shutil.rmtree(path, ignore_errors=True)
        half.replace(path)
    finally:
        shutil.rmtree(half, ignore_errors=True)
