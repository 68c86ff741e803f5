"""The last checkpoints of a training in progress, in a folder of their own.

    step-000000120/
        model.safetensors, optimizer.safetensors, rng.safetensors, state.json    (checkpoint.py)
        progress.json      what the caller wants back: the curve so far, times
        checksums.json     bytes and SHA-256 of each of them

A checkpoint is written under another name, flushed to the disk and renamed, so under its own name it is
whole; the checksums tell when the disk damaged it later. A copy of the state is taken on the training
thread, and written by another while training goes on.

Several ranks share the folder. In the middle of a training each writes its part
(stages/training/distributed_checkpoint.py) in place of the first three files; the first alone checks, names
and removes checkpoints. Their writing threads agree among themselves, over connections of their own.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stages.training.checkpoint import (
    CheckpointError,
    Reading,
    Share,
    Snapshot,
    check_share,
    put_into_state,
    read_checkpoint,
    take_share,
    take_snapshot,
    write_scalars,
    write_snapshot,
)
from stages.training.checksums import CHECKSUMS, PROGRESS, checksums_of, flush, read_checked
from stages.training.distributed_checkpoint import CANNOT, WritingRanks, as_os_error
from stages.training.ranks import ALONE, Ranks
from stages.training.state import TrainState

_PREFIX = "step-"
T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What a run goes on from."""

    folder: Path
    progress: dict[str, Any]
    damaged: tuple[str, ...]
    """One sentence for each newer checkpoint that could not be used."""


class CheckpointStore:
    """Writes and finds the checkpoints in `folder`; one process at a time, or all `ranks` of one training.

    All ranks must call `save`, `save_now`, `wait` and `restore` together. The rest is each one's own.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks = ALONE):
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
        self._ranks = ranks
        self._writers: WritingRanks | None = None
        """Made with the first share."""
        self._lost: RuntimeError | None = None
        """What the writing threads lost each other by; they are of no use from then on."""

    def save(self, state: TrainState, progress: dict[str, Any]) -> None:
        """Copy the state now and write it in the background."""
        started = time.perf_counter()
        self._join()
        self.saves += 1
        if self._ranks.has_others:
            self._start(self._write_together, state.step, self._share(state, copy=True), progress)
        else:
            try:
                snapshot = take_snapshot(state)
            except CANNOT as error:
                self._error = as_os_error(error)
            else:
                self._start(self._write, snapshot, progress)
        self.training_seconds += time.perf_counter() - started

    def save_now(self, state: TrainState, progress: dict[str, Any], *, consolidated: bool = False) -> Path:
        """Write the state before returning, without a copy of it; returns the checkpoint's folder.

        Args:
            consolidated: also of several ranks the form that one alone writes; the first gathers it in its
                host memory.

        Raises:
            OSError: it cannot be written; the checkpoints before are whole. On all ranks or on none.
            RuntimeError: another rank is gone or does not answer.
        """
        started = time.perf_counter()
        self._join()
        self._error = None
        self.saves += 1
        if self._ranks.has_others and not consolidated:
            self._write_together(state.step, self._share(state, copy=False), progress)
        else:
            try:
                snapshot = take_snapshot(state, copy=False, ranks=self._ranks)
            except (OSError, MemoryError) as error:  # a RuntimeError may be a gather that the others wait in
                self._error = as_os_error(error)
            else:
                if self._ranks.is_first:
                    self._write(snapshot, progress)
            self._error, self.written_step = self._from_first((self._error, self.written_step))
        self.training_seconds += time.perf_counter() - started
        if self._lost is not None:
            raise self._lost
        if self._error is not None:
            raise self._error
        return self._place(state.step)

    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Until what `save` began is written, or could not be; at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def take_warning(self) -> str | None:
        """What went wrong with the last checkpoint, in words; None when asked again. The first rank tells."""
        error, self._error = self._error, None
        was_lost, self._was_lost = self._was_lost, False
        if not self._ranks.is_first:
            return None
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
        ranks = self._ranks
        if ranks.is_first:
            for leftover in self.folder.glob(f".{_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        damaged: dict[Path, str] = {}
        for folder in ranks.from_first(list(reversed(self.checkpoints()))):
            progress, reading, problem = self._read(folder, state)
            if problems := [text for text in ranks.gather(problem) if text is not None]:
                damaged[folder] = problems[0]
                continue
            assert progress is not None and reading is not None, "neither is missing without a problem"
            put_into_state(state, reading)
            if ranks.is_first:
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

    def _start(self, write: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=write, args=arguments, name="checkpoint")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read(
        self, folder: Path, state: TrainState
    ) -> tuple[dict[str, Any] | None, Reading | None, str | None]:
        """The progress, what is for this rank, and if they cannot be read why not. The first one checks
        every byte, before the others trust them."""
        progress, reading, problem = None, None, None
        try:
            if self._ranks.is_first:
                progress = read_checked(folder)
        except CheckpointError as error:
            problem = str(error)
        progress, problem = self._from_first((progress, problem))
        try:
            if problem is None:
                reading = read_checkpoint(state, folder)
        except CheckpointError as error:
            problem = str(error)
        return progress, reading, problem

    def _meet_writers(self) -> WritingRanks:
        """Their group can only be made by all ranks together, and on the training thread."""
        if self._writers is None:
            self._writers = WritingRanks(self._ranks)
        return self._writers

    def _from_first(self, value: T) -> T:
        """What the first rank found, for which the others wait as long as its disk takes."""
        return self._meet_writers().from_first(value) if self._ranks.has_others else value

    def _share(self, state: TrainState, *, copy: bool) -> Share | OSError:
        """This rank's part, or why there is none: the others must be told, they would wait for it."""
        self._meet_writers()
        try:
            return take_share(state, self._ranks, copy=copy)
        except CANNOT as error:
            return as_os_error(error)

    def _write(self, snapshot: Snapshot, progress: dict[str, Any]) -> None:
        """What one rank does, in its writing thread."""
        started = time.perf_counter()
        step = snapshot.scalars["step"]
        half = self._half(step)
        try:
            try:
                self._begin(half)
                write_snapshot(snapshot, half)
                self._complete(half, step, progress)
            except CANNOT:
                shutil.rmtree(half, ignore_errors=True)  # room for the next try
                raise
            self.remove(self.checkpoints()[: -self.keep])
        except CANNOT as error:
            self._error = as_os_error(error)
        self.writing_seconds += time.perf_counter() - started

    def _write_together(self, step: int, share: Share | OSError, progress: dict[str, Any]) -> None:
        """What each of several ranks does, in its writing thread."""
        started = time.perf_counter()
        half = self._half(step)
        try:
            try:
                self._write_shares(step, share, half, progress)
            except CANNOT:
                if self._ranks.is_first:
                    shutil.rmtree(half, ignore_errors=True)  # room for the next try
                raise
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # what a rank could not do is an OSError by now: they could not agree
            self._error, self._lost = OSError("another rank is gone or does not answer"), error
        self.writing_seconds += time.perf_counter() - started

    def _write_shares(self, step: int, share: Share | OSError, half: Path, progress: dict[str, Any]) -> None:
        """Step by step; after each one all ranks know whether every one could take it."""
        writers = self._writers
        assert writers is not None, "made with the share"
        with writers.all_can():
            if isinstance(share, OSError):
                raise share
            if self._ranks.is_first:
                self._begin(half)
        assert isinstance(share, Share), "or no rank goes on"
        writers.write(share.tensors, half, share.files)
        with writers.all_can():
            if self._ranks.is_first:
                check_share(share, half)
                write_scalars(share.scalars, half)
                self._complete(half, step, progress)
        self.written_step = step
        with writers.all_can():
            if self._ranks.is_first:
                self.remove(self.checkpoints()[: -self.keep])

    def _half(self, step: int) -> Path:
        """Where a checkpoint is until it is whole."""
        place = self._place(step)
        return place.with_name(f".{place.name}")

    def _begin(self, half: Path) -> None:
        shutil.rmtree(half, ignore_errors=True)
        if not self.folder.is_dir():
            self._was_lost = True
            self.folder.mkdir(parents=True)
        half.mkdir()

    def _complete(self, half: Path, step: int, progress: dict[str, Any]) -> None:
        """Give a checkpoint its name, once all of it is on the disk."""
        place = self._place(step)
        (half / PROGRESS).write_text(json.dumps(progress))
        (half / CHECKSUMS).write_text(json.dumps(checksums_of(half), indent=1) + "\n")
        for file in half.iterdir():
            flush(file)
        flush(half)
        if place.exists():
            self.remove([place])  # of an earlier try at this step, and so the same
        half.rename(place)
        flush(self.folder)
        self.written_step = step
