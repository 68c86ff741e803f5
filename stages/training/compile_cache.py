"""Where torch.compile keeps what it made, over runs and over kills."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_MARKER = "compiling-"


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
    are newer.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for marker in cache.glob(f"{_MARKER}*"):
        _remove_half_compiled(cache, marker)
    marker = cache / f"{_MARKER}{os.getpid()}"
    with marker.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        marker.unlink(missing_ok=True)


def _remove_half_compiled(cache: Path, marker: Path) -> None:
    try:
        with marker.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            since = marker.stat().st_mtime
            for library in cache.rglob("*.so"):
                if library.stat().st_mtime >= since:
                    library.unlink(missing_ok=True)
            marker.unlink(missing_ok=True)
    except (BlockingIOError, FileNotFoundError):
        return  # its process lives and compiles, or another one has just done this
