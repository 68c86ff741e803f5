"""What a stage has in progress: .work/STAGE/VARIANT/FINGERPRINT/, held by one process at a time.

The folder is keyed by the fingerprint of all that decides the result, so changed params start afresh and
changing them back finds the old progress.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

_FINGERPRINT_DIGITS = 16
_LOCK = "lock"
_REMOVED = ".removed"

_KEPT_SECONDS = 30 * 24 * 3600.0
_KEPT_PER_VARIANT = 3

# Who holds a lock writes its name into it at once, and who prunes holds it shortly.
_PATIENCE_SECONDS = 1.0


class WorkFolderError(RuntimeError):
    """The work folder cannot be used, or another process uses it; one sentence says what to do."""


@contextlib.contextmanager
def hold_work_folder(
    root: Path, stage: str, variant: str, fingerprint: str, *, fresh: bool = False
) -> Iterator[Path]:
    """Make and lock `root/stage/variant/fingerprint[:16]`, and prune what older runs left under `stage`.

    Pruned are folders not used for 30 days and, of each variant, all but the 3 used last; never one that
    a process holds. The lock ends with the block or with the process, however that ends.

    Args:
        root: `work_root()`.
        fresh: empty the folder first.

    Raises:
        WorkFolderError: another process holds it, or it cannot be made, written or emptied.
    """
    folder = root / stage / variant / fingerprint[:_FINGERPRINT_DIGITS]
    try:
        lock = _wait_for_lock(folder)
        if lock is None:
            raise WorkFolderError(_held_message(folder, stage, variant))
    except OSError as error:
        raise _unusable(folder, error) from None
    _locks.add(lock)
    try:
        try:
            _sign(lock)
            if fresh:
                _empty(folder)
        except OSError as error:
            raise _unusable(folder, error) from None
        _prune(root / stage)
        yield folder
        with contextlib.suppress(OSError):
            os.utime(lock)
    finally:
        _locks.discard(lock)
        os.close(lock)


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


def _wait_for_lock(folder: Path) -> int | None:
    """The locked file's descriptor; None where another process keeps it."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        lock = _try_lock(folder)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(0.05)


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
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass  # held, or pruned between opening and locking
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _sign(lock: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder).encode(), 0)


def _held_message(folder: Path, stage: str, variant: str) -> str:
    does = "trains" if stage == "train" else f"is at {stage},"
    try:
        holder = json.loads((folder / _LOCK).read_text())
        pid, host, since = int(holder["pid"]), str(holder["host"]), float(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"another process {does} {variant} with these params; wait for it or stop it"
    start = datetime.fromtimestamp(since).isoformat(timespec="seconds")
    return (
        f"process {pid} on {host} {does} {variant} with these params since {start} "
        f"({_ago(time.time() - since)}); wait for it or stop it: `kill {pid}` lets it save"
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
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (folder / _LOCK).stat()):
            # Renamed first: who takes this folder now makes a new one and never finds half of the old.
            removed = folder.with_name(f".{folder.name}{_REMOVED}")
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(lock)


# flock belongs to the open file, which a forked worker shares: it would hold the lock after our death.
_locks: set[int] = set()


def _close_in_child() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)
