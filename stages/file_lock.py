"""Locks that end with the process that holds them, however it ends; the locked file says who that is."""

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """What a holder wrote into the file it locked."""

    pid: int
    host: str
    name: str
    since: float
    """Seconds since the epoch."""


def lock_now(file: int, path: Path) -> bool:
    """Lock a file that was just opened; where another process has it, close it.

    Children that are forked later do not hold it too.

    Args:
        file: a descriptor of `path`, for reading and writing.

    Returns:
        False too where `path` was removed, or is another file by now.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.stat()):
            _held.add(file)
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return False


def unlock(file: int) -> None:
    _held.discard(file)
    os.close(file)


def sign(file: int, name: str) -> None:
    """Write into a locked file who holds it.

    Args:
        name: of what this process does, such as "train baseline".
    """
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "name": name, "since": time.time()}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def read_holder(path: Path) -> Holder | None:
    """Who signed a file last; None where nobody has, or not yet."""
    try:
        found = json.loads(path.read_text())
        return Holder(int(found["pid"]), str(found["host"]), str(found["name"]), float(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


# flock belongs to the open file, which a forked worker shares: it would hold the lock after our death.
_held: set[int] = set()


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
