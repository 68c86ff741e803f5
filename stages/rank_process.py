"""One rank among several: how it says why it failed, and how it leaves.

A rank that failed takes the others with it: their collectives break, or wait until they time out. So that
one line tells the cause, each rank writes its own into a file that the launcher names, in the format of
`torchrun`, and a rank that only lost another says so by its exit status.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: where a rank records its failure; of torchrun, and of `stages.rank_launch`."""
EXIT_LOST_PEER = 76
"""Exit status of a rank whose collective failed because another rank is gone or does not answer."""
TIMEOUT_PARAM = "hardware.collective_timeout_minutes"

# Every failure of gloo's connections names the source file; a failed check of sizes there is no lost peer.
_GLOO, _GLOO_CHECK = "/gloo/transport/", "enforce fail"
_NCCL = (
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Some NCCL operations have failed or timed out",
    "Watchdog caught collective operation timeout",
)
_TIMED_OUT = (
    "Timed out waiting",  # gloo
    "Application timeout caused pair closure",  # gloo, after another thread's timeout
    "wait timeout after",  # the store
    "timed out after",  # the store's client
    "Watchdog caught collective operation timeout",  # NCCL
)


def record_failure(message: str, error: BaseException | None = None) -> None:
    """Record why this rank fails, once: the first record stays. The launcher shows one rank's.

    Without a launcher that reads a record, the message goes to stderr.

    Args:
        message: one sentence.
        error: a failure that nobody expected, whose traceback is to be shown too.
    """
    trace = "" if error is None else "".join(traceback.format_exception(error))
    _record(message, trace, int(time.time()))


def leave_for_lost_peer(error: BaseException, timeout_minutes: float) -> NoReturn:
    """End this process with EXIT_LOST_PEER; the cause is in another one.

    Args:
        error: for which `is_lost_peer`.
        timeout_minutes: of the collectives.
    """
    message = "another rank is gone"
    if _is_timeout(error):
        message = f"another rank did not answer for {timeout_minutes:g} minutes ({TIMEOUT_PARAM})"
    # torchrun calls the earliest record the root cause, and counts in whole seconds.
    _record(message, _in_one_line(error), int(time.time()) + 2)
    leave(EXIT_LOST_PEER)


def leave(status: int) -> NoReturn:
    """End this process at once. What runs at an ordinary exit waits for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective or the store raised this because another rank is gone or did not answer."""
    # Not above: to fail for another reason a rank need not wait for torch.
    from torch.distributed import DistNetworkError, DistStoreError

    if isinstance(error, (DistNetworkError, DistStoreError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        (_GLOO in text and _GLOO_CHECK not in text) or any(sign in text for sign in _NCCL)
    )


def _is_timeout(error: BaseException) -> bool:
    return any(sign in str(error) for sign in _TIMED_OUT)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _record(message: str, trace: str, timestamp: int) -> None:
    """Args: timestamp: seconds since the epoch."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        print(f"{trace}rank {rank} of {count}: {message}", file=sys.stderr, flush=True)
        return
    # torchrun shows `py_callstack` alone.
    details = {"py_callstack": f"{message}\n{trace}".rstrip(), "timestamp": str(timestamp)}
    record = {"message": {"message": message, "extraInfo": details}}
    # Whole or not at all: torchrun fails over half a record.
    draft = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):  # the exit status is left to tell
        if not Path(path).exists():
            draft.write_text(json.dumps(record), encoding="utf-8")
            draft.replace(path)
