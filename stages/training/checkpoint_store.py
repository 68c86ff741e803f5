"""The last checkpoints of a training in progress, in a folder of their own.

    step-000000120/
        model.safetensors, optimizer.safetensors, rng.safetensors, state.json    (checkpoint.py)
        progress.json      what the caller wants back: the curve so far, times
        checksums.json     bytes and SHA-256 of each of them

A checkpoint is written under another name, flushed to the disk and renamed, so under its own name it is
whole; the checksums tell when the disk damaged it later. A copy of the state is taken on the training
thread, and written by another while training goes on.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.training.checkpoint import (
    CheckpointError,
    Snapshot,
    load_checkpoint,
    take_snapshot,
    write_snapshot,
)
from stages.training.state import TrainState

PROGRESS, CHECKSUMS = "progress.json", "checksums.json"
_PREFIX = "step-"

_CANNOT = (OSError, MemoryError, RuntimeError)
"""What keeps a checkpoint from being made: the disk, or host memory for the copy. Training goes on."""


@dataclass(frozen=True)
class Restored:
    """What a run goes on from."""

    folder: Path
    progress: dict[str, Any]
    damaged: tuple[str, ...]
    """One sentence for each newer checkpoint that could not be used."""


class CheckpointStore:
    """Writes and finds the checkpoints in `folder`; one process at a time."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.saves = 0
        """Checkpoints that were begun."""
        self.training_seconds = 0.0
        """Of the training thread: the copy, and waiting for the write before."""
        self.writing_seconds = 0.0
        """Of the writing thread, beside the training."""
        self._thread: threading.Thread | None = None
        self.written_step: int | None = None
        """Of the last checkpoint that was written whole."""
        self._error: OSError | None = None
        self._was_lost = False

    def save(self, state: TrainState, progress: dict[str, Any]) -> None:
        """Copy the state now and write it in the background."""
        started = time.perf_counter()
        self._join()
        self.saves += 1
        try:
            snapshot = take_snapshot(state)
        except _CANNOT as error:
            self._error = _as_os_error(error)
        else:
            self._thread = threading.Thread(target=self._write, args=(snapshot, progress), name="checkpoint")
            self._thread.start()
        self.training_seconds += time.perf_counter() - started

    def save_now(self, state: TrainState, progress: dict[str, Any]) -> Path:
        """Write the state before returning, without a copy of it; returns the checkpoint's folder.

        Raises:
            OSError: it cannot be written; the checkpoints before are whole.
        """
        started = time.perf_counter()
        self._join()
        self._error = None
        self.saves += 1
        try:
            self._write(take_snapshot(state, copy=False), progress)
        except _CANNOT as error:
            self._error = _as_os_error(error)
        self.training_seconds += time.perf_counter() - started
        if self._error is not None:
            raise self._error
        return self._place(state.step)

    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until what `save` began is written, or could not be."""
        self._join()

    def take_warning(self) -> str | None:
        """What went wrong with the last checkpoint, in words; None when asked again."""
        error, self._error = self._error, None
        was_lost, self._was_lost = self._was_lost, False
        if error is not None:
            return f"no checkpoint could be written ({error}); the one before is whole and training goes on"
        if was_lost:
            return f"{self.folder} was deleted while training; it is made again, its checkpoints are lost"
        return None

    def restore(self, state: TrainState) -> Restored | None:
        """Put the newest checkpoint that is whole into a fresh `state`; None where there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and every one is damaged; `state` is as it was.
        """
        for leftover in self.folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        damaged: dict[Path, str] = {}
        for folder in reversed(self.checkpoints()):
            try:
                progress = read_checked(folder)
                load_checkpoint(state, folder)
            except CheckpointError as error:
                damaged[folder] = str(error)
                continue
            self.remove(damaged)  # or they would count among those that are kept
            return Restored(folder, progress, tuple(damaged.values()))
        if damaged:
            raise CheckpointError("; ".join(damaged.values()))
        return None

    def checkpoints(self) -> list[Path]:
        """Their folders, oldest first."""
        found = [path for path in self.folder.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdigit()]
        return sorted(found, key=lambda path: int(path.name[len(_PREFIX) :]))

    def remove(self, folders: Iterable[Path]) -> None:
        """Give the disk of these checkpoints back. Who is killed in it leaves no half one under its name."""
        for folder in folders:
            gone = folder.with_name(f".{folder.name}.removed")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)

    def _place(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:09}"

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, progress: dict[str, Any]) -> None:
        started = time.perf_counter()
        try:
            self._write_checkpoint(snapshot, progress)
        except _CANNOT as error:
            self._error = _as_os_error(error)
        self.writing_seconds += time.perf_counter() - started

    def _write_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any]) -> None:
        place = self._place(snapshot.scalars["step"])
        half = place.with_name(f".{place.name}")
        shutil.rmtree(half, ignore_errors=True)
        try:
            if not self.folder.is_dir():
                self._was_lost = True
                self.folder.mkdir(parents=True)
            half.mkdir()
            write_snapshot(snapshot, half)
            (half / PROGRESS).write_text(json.dumps(progress))
            (half / CHECKSUMS).write_text(json.dumps(_checksums(half), indent=1) + "\n")
            for file in half.iterdir():
                _flush(file)
            _flush(half)
            if place.exists():
                self.remove([place])  # of an earlier try at this step, and so the same
            half.rename(place)
            _flush(self.folder)
        except _CANNOT:
            shutil.rmtree(half, ignore_errors=True)  # room for the next try
            raise
        self.written_step = snapshot.scalars["step"]
        self.remove(self.checkpoints()[: -self.keep])


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


def _checksums(folder: Path) -> dict[str, dict[str, int | str]]:
    return {file.name: _digest(file) for file in sorted(folder.iterdir())}


def _digest(file: Path) -> dict[str, int | str]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _as_os_error(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error) or type(error).__name__)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk and not only in its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
