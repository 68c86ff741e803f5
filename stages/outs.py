"""Outs appear whole or not at all: written beside their place, flushed to disk, then renamed.

What a killed process leaves beside an out has a fixed name, ends in .part, and is removed by the next one
that writes that out. No file is rewritten in place: DVC's cache, or the work folder, may have linked it.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Another file system, one without hard links, or too many links to one file.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def write_out(path: Path, content: str | bytes) -> None:
    """Write one file and its parent folders. A reader sees the old content or the new, never half.

    Raises:
        OSError: with a file name; the old content is still there.
    """
    with _names(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        half = _beside(path)
        _remove(half)
        try:
            with half.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            half.replace(path)
            _fsync(path.parent)
        finally:
            half.unlink(missing_ok=True)


@contextmanager
def out_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` when the block ends without an error.

    Raises:
        OSError: with a file name; the old folder is still there.
    """
    with _names(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        half, old = _beside(path), path.with_name(f".{path.name}.old.part")
        _remove(half)
        _remove(old)
        half.mkdir()
        try:
            yield half
            for folder, _, files in os.walk(half):
                for name in files:
                    _fsync(Path(folder) / name)
                _fsync(Path(folder))
            _swap(half, path, old)
        finally:
            shutil.rmtree(half, ignore_errors=True)
        with suppress(OSError):
            _remove(old)


def publish_folder(files: Mapping[str, Path | str], path: Path) -> None:
    """Make the folder `path` of files that exist and of new ones, taking no disk twice where it can.

    Args:
        files: by their names in `path`, a file to hard-link (copied where that is impossible) or a text
            to write.

    Raises:
        OSError: with a file name; the old folder is still there.
    """
    with out_folder(path) as folder:
        for name, content in files.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                place.write_text(content, encoding="utf-8")
            else:
                _link_or_copy(content, place)


def _link_or_copy(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, place)


def _swap(new: Path, path: Path, old: Path) -> None:
    """`path` is whole before and after; killed in between, both folders are there under other names."""
    had_one = os.path.lexists(path)
    if had_one:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if had_one:
            old.rename(path)
        raise
    _fsync(path.parent)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    """Of a file its content, of a folder the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _names(path: Path) -> Iterator[None]:
    """An OSError from writing to an open file ("No space left on device") names no file; name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
