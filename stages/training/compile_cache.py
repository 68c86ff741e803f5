"""Where torch.compile keeps what it made, over runs and over kills."""

import fcntl
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_MARKER = "compiling-"
_CLEANING = "cleaning.lock"
_PATIENCE_SECONDS = 60.0
"""For one that compiles its first step. Not for ever: it may be a rank that waits for us."""


def use_compile_cache(folder: Path) -> Path:
    """Keep compiled graphs and kernels in `folder`, so that a second run starts warm; returns where they are.

    Must be called before the first compilation. A folder the user named in the environment wins; torch's
    own default, which merely importing parts of the compiler writes there, does not: it lies under the
    temporary folder and is lost with the machine. What is compiled is found again by a hash of the traced
    graph, the compiler's settings (the memory budget among them) and torch's version; tracing itself is
    done in every run.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, str(Path(default_cache_dir()).absolute())):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    folder.mkdir(parents=True, exist_ok=True)
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@contextmanager
def compiling(cache: Path) -> Iterator[None]:
    """Around whatever compiles: who is killed in this block leaves no half library to be loaded.

    The C++ compiler writes a library under its last name, and Inductor takes for whole what is there: a run
    after `kill -9` would end with "file too short", again and again. So a marker says since when a process
    has been compiling. It stays where the process died, and whoever comes next removes the libraries that
    are newer. What a process that is compiling now may be writing is left alone: it is waited for, and where
    it takes too long, those libraries and the marker are left for a later start.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # One process at a time: who comes second must not load what the first is about to remove.
        with (cache / _CLEANING).open("w") as cleaning:
            fcntl.flock(cleaning, fcntl.LOCK_EX)
            _remove_half_compiled(cache)
            # Containers that share a cache have the same process numbers.
            marker = cache / f"{_MARKER}{os.getpid()}-{uuid.uuid4().hex[:8]}"
            fcntl.flock(stack.enter_context(marker.open("w")), fcntl.LOCK_EX)
        yield
        marker.unlink(missing_ok=True)


def _remove_half_compiled(cache: Path) -> None:
    give_up = time.monotonic() + _PATIENCE_SECONDS
    abandoned, living = _markers(cache)
    while abandoned and living and time.monotonic() < give_up:
        time.sleep(0.2)
        abandoned, living = _markers(cache)
    if not abandoned:
        return
    until = min(living.values(), default=math.inf)
    for library in cache.rglob("*.so"):
        with suppress(FileNotFoundError):
            if min(abandoned.values()) <= library.stat().st_mtime < until:
                library.unlink()
    if not living:
        for marker in abandoned:
            marker.unlink(missing_ok=True)


def _markers(cache: Path) -> tuple[dict[Path, float], dict[Path, float]]:
    """Those of the dead and of the living, and since when each compiles."""
    abandoned: dict[Path, float] = {}
    living: dict[Path, float] = {}
    for marker in cache.glob(f"{_MARKER}*"):
        with suppress(FileNotFoundError):
            (abandoned if _is_abandoned(marker) else living)[marker] = marker.stat().st_mtime
    return abandoned, living


def _is_abandoned(marker: Path) -> bool:
    """Whether its process is gone: the lock went with it."""
    with marker.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
