"""Whether the files of a checkpoint are on the disk as they were written."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from stages.training.checkpoint import CheckpointError

PROGRESS, CHECKSUMS = "progress.json", "checksums.json"


def read_checked(folder: Path) -> dict[str, Any]:
    """The progress kept beside a checkpoint, once every file is known to be as it was written.

    Raises:
        CheckpointError: a file is missing, cut short or changed; it is named.
    """
    path = folder / CHECKSUMS
    try:
        expected = json.loads(path.read_bytes())
        if not isinstance(expected, dict) or {*expected, CHECKSUMS} != {
            file.name for file in folder.iterdir()
        }:
            raise ValueError("it does not list the files that are there")
        for name, facts in expected.items():
            if _digest(folder / name) != facts:
                raise CheckpointError(f"{folder / name} is not as it was written: the file is damaged")
        progress = json.loads((folder / PROGRESS).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    assert isinstance(progress, dict), "the checksum says that it is what was written"
    return progress


def checksums_of(folder: Path) -> dict[str, dict[str, int | str]]:
    """Bytes and SHA-256 of every file in it, by name."""
    return {file.name: _digest(file) for file in sorted(folder.iterdir())}


def _digest(file: Path) -> dict[str, int | str]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk and not only in its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
