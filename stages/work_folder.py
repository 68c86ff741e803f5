"""What a stage has in progress: .work/STAGE/VARIANT/FINGERPRINT/, held by one process at a time.

The folder is keyed by the fingerprint of all that decides the result, so changed params start afresh and
changing them back finds the old progress.
"""

import contextlib
import fcntl
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from stages.file_lock import lock_now, read_holder, sign, unlock

_FINGERPRINT_DIGITS = 16
_LOCK = "lock"
_REMOVED = ".removed"

_KEPT_SECONDS = 30 * 24 * 3600.0
_KEPT_PER_VARIANT = 3

# Who holds a lock writes its name into it at once, and who prunes holds it shortly.
_PATIENCE_SECONDS = 1.0
_SECONDS_BETWEEN_LOOKS = 0.5


class WorkFolderError(RuntimeError):
    """The work folder cannot be used, or another process uses it; one sentence says what to do."""


@contextlib.contextmanager
def hold_work_folder(
    root: Path,
    stage: str,
    variant: str,
    fingerprint: str,
    *,
    fresh: bool = False,
    waits_as: str | None = None,
) -> Iterator[Path]:
    """Make and lock `root/stage/variant/fingerprint[:16]`, and prune what older runs left under `stage`.

    Pruned are folders not used for 30 days and, of each variant, all but the 3 used last; never one that
    a process holds. The lock ends with the block or with the process, however that ends.

    Args:
        root: `work_root()`.
        fresh: empty the folder first.
        waits_as: where another process holds it, wait until that ends, and say so in one line that begins
            with this name of what runs, such as "tokenize". None: do not wait.

    Raises:
        WorkFolderError: another process holds it, or it cannot be made, written or emptied.
    """
    folder = root / stage / variant / fingerprint[:_FINGERPRINT_DIGITS]
    try:
        lock = _lock_within(_PATIENCE_SECONDS, folder, 0.05)
        if lock is None and waits_as is None:
            raise WorkFolderError(_held_message(folder, stage, variant, waits=False))
        if lock is None:
            line = f"{waits_as}: {_held_message(folder, stage, variant, waits=True)}"
            print(line, file=sys.stderr, flush=True)
            lock = _lock_within(math.inf, folder, _SECONDS_BETWEEN_LOOKS)
            assert lock is not None
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        try:
            sign(lock, f"{stage} {variant}")
            if fresh:
                _empty(folder)
        except OSError as error:
            raise _unusable(folder, error) from None
        _prune(root / stage)
        yield folder
        with contextlib.suppress(OSError):
            os.utime(lock)
    finally:
        unlock(lock)


def is_any_held(root: Path) -> bool:
    """Whether a process holds a work folder under `root`, a `work_root()`."""
    for path in root.glob(f"*/*/*/{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(lock)
    return False


def _lock_within(seconds: float, folder: Path, seconds_between_looks: float) -> int | None:
    """The locked file's descriptor; None where another process keeps it for longer."""
    deadline = time.monotonic() + seconds
    while True:
        lock = _try_lock(folder)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(seconds_between_looks)


def _try_lock(folder: Path) -> int | None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not exist_ok, which raises where another process prunes the folder in this moment.
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # pruned since mkdir
        return None
    return lock if lock_now(lock, path) else None


def _held_message(folder: Path, stage: str, variant: str, *, waits: bool) -> str:
    does = f"trains {variant}" if stage == "train" else f"is at {stage} ({variant})"
    holder = read_holder(folder / _LOCK)
    if holder is None:
        then = "waiting for it" if waits else "wait for it or stop it"
        return f"another process {does} with these params; {then}"
    start = datetime.fromtimestamp(holder.since).isoformat(timespec="seconds")
    kill = f"`kill {holder.pid}`"
    then = f"waiting for it ({kill} stops it)" if waits else f"wait for it or stop it: {kill} lets it save"
    return (
        f"process {holder.pid} on {holder.host} {does} with these params since {start} "
        f"({_ago(time.time() - holder.since)}); {then}"
    )


def _ago(seconds: float) -> str:
    for unit, unit_seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if count := int(seconds // unit_seconds):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"


def _unusable(folder: Path, error: OSError) -> WorkFolderError:
    reason = error.strerror or str(error)
    return WorkFolderError(
        f"{folder}: cannot be used to keep work in progress ({reason}); make it a writable folder "
        "on a disk with free space"
    )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _prune(stage_folder: Path) -> None:
    """Remove what is too old or too much; what cannot be removed stays, for training goes on."""
    with contextlib.suppress(OSError):
        for variant_folder in stage_folder.iterdir():
            if variant_folder.is_dir():
                for leftover in variant_folder.glob(f".*{_REMOVED}"):
                    shutil.rmtree(leftover, ignore_errors=True)
                for folder in _superfluous(variant_folder):
                    _remove_unless_held(folder)


def _superfluous(variant_folder: Path) -> list[Path]:
    folders = [path for path in variant_folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    last_used = {folder: _last_used(folder) for folder in folders}
    latest_first = sorted(folders, key=lambda folder: (-last_used[folder], folder.name))
    oldest_kept = time.time() - _KEPT_SECONDS
    return [
        folder
        for rank, folder in enumerate(latest_first)
        if rank >= _KEPT_PER_VARIANT or last_used[folder] < oldest_kept
    ]


def _last_used(folder: Path) -> float:
    """Seconds since the epoch: of the lock or, in a run of many weeks, of its newest checkpoint."""
    times = [folder.stat().st_mtime]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that its trainer replaced
            times.append(path.stat().st_mtime)
    return max(times)


def _remove_unless_held(folder: Path) -> None:
    path = folder / _LOCK
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not lock_now(lock, path):
            return
        try:
            # Renamed first: who takes this folder now makes a new one and never finds half of the old.
            removed = folder.with_name(f".{folder.name}{_REMOVED}")
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        finally:
            unlock(lock)
