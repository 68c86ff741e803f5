"""The journal of one run: an append-only file of JSON lines that says all MLflow shall ever know.

    <work_root>/tracking/<variant>-<fingerprint12>/<number>/
        journal.jsonl    the truth, one record a line
        artifacts/       copies of the files to attach
        sent-<hash>.json one per MLflow store: how far it has been told (written by the sender alone)
        tracker.lock     held by the process that is training this run
        sender.lock      held while something is being sent

A forced second training of the same fingerprint is a run of its own, hence the number.

Records, by `kind`: `run` (first line: who the run is), `params`, `tags`, `dataset`, `metrics`
(`step`, `time` in ms, `metrics`), `artifact` (`file` under artifacts/, or an absolute path),
`status` (RUNNING, FINISHED, FAILED, KILLED).
"""

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def now_ms() -> int:
    """Milliseconds since 1970, MLflow's unit of time."""
    return time.time_ns() // 1_000_000


class Journal:
    """One run's folder. Appending takes some ten microseconds and is safe from several processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "journal.jsonl"
        self._fd: int | None = None

    @property
    def variant(self) -> str:
        return self.folder.parent.name.rpartition("-")[0]

    @property
    def name(self) -> str:
        """For messages: variant-fingerprint, and the number where it is not the first."""
        number = "" if self.folder.name == "1" else f" (run {self.folder.name})"
        return f"{self.folder.parent.name}{number}"

    @property
    def is_first_of_its_fingerprint(self) -> bool:
        return self.folder.name == "1"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def append(self, *records: Record) -> None:
        """Write whole lines at the end. OSError when the disk is full: then nothing was written."""
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            end = _end_of_whole_lines(self._fd)
            if os.write(self._fd, lines) < len(lines):
                os.ftruncate(self._fd, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self, offset: int = 0) -> Iterator[tuple[Record, int]]:
        """Each whole record from byte `offset` on, with the offset of its end."""
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # being written, or torn by a kill: the next append removes it
                offset += len(line)
                yield json.loads(line), offset

    def status(self) -> str | None:
        """The last status written."""
        statuses = [record["status"] for record, _ in self.read() if record["kind"] == "status"]
        return statuses[-1] if statuses else None

    def fsync(self) -> None:
        """Before a server is told: it must never know what a power cut could take from the journal."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def mark_if_abandoned(self) -> None:
        """A run that says RUNNING while no process trains it was killed: write that down."""
        with self.locked("tracker.lock") as nobody_trains:
            if nobody_trains and self.status() == "RUNNING":
                self.append({"kind": "status", "status": "KILLED", "time": now_ms()})

    @contextlib.contextmanager
    def locked(self, file_name: str, patience_seconds: float = 0) -> Iterator[bool]:
        """Hold the lock `file_name`, waiting so long for it; False when another process has it."""
        with (self.folder / file_name).open("a") as file:
            yield _lock(file.fileno(), patience_seconds)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def newest_journal(work_root: Path, variant: str, fingerprint: str) -> Journal | None:
    """The journal of the last training of this variant with this fingerprint, if any."""
    runs = _runs_in(_folder_of(work_root, variant, fingerprint))
    return runs[-1] if runs else None


def start_journal(work_root: Path, variant: str, fingerprint: str, experiment: str) -> Journal:
    """A new run beside those of the same fingerprint that are already there."""
    folder = _folder_of(work_root, variant, fingerprint)
    number = 1 + max((int(journal.folder.name) for journal in _runs_in(folder)), default=0)
    journal = Journal(folder / str(number))
    journal.folder.mkdir(parents=True, exist_ok=True)
    journal.append(
        {
            "kind": "run",
            "journal": uuid.uuid4().hex,
            "variant": variant,
            "fingerprint": fingerprint,
            "experiment": experiment,
            "time": now_ms(),
        }
    )
    return journal


def all_journals(work_root: Path) -> list[Journal]:
    """Every run tracked here, by name and age."""
    folders = sorted((work_root / "tracking").glob("*/"))
    return [journal for folder in folders for journal in _runs_in(folder)]


def _folder_of(work_root: Path, variant: str, fingerprint: str) -> Path:
    return work_root / "tracking" / f"{variant}-{fingerprint[:12]}"


def _runs_in(folder: Path) -> list[Journal]:
    numbers = sorted(int(path.parent.name) for path in folder.glob("[0-9]*/journal.jsonl"))
    journals = [Journal(folder / str(number)) for number in numbers]
    # A kill between creating the file and its first line leaves an empty one, which is no run yet.
    return [journal for journal in journals if next(journal.read(), None) is not None]


def _end_of_whole_lines(fd: int) -> int:
    """Remove what a kill left of a half-written last line; the file's size in bytes."""
    end = os.fstat(fd).st_size
    if end and os.pread(fd, 1, end - 1) != b"\n":
        end = os.pread(fd, end, 0).rfind(b"\n") + 1
        os.ftruncate(fd, end)
    return end


def _lock(fd: int, patience_seconds: float) -> bool:
    give_up = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.1)
