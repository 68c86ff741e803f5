"""Starts the ranks of a stage on this machine, and makes one exit status and one line of how they end.

The ranks get `torchrun`'s environment, and the same program runs under it. Its agent itself
(`torch.distributed.elastic`) is not used. It ends all ranks with SIGTERM as soon as one leaves with another
status than 0, and kills them 30 seconds later, whatever it was configured to wait: a rank that has saved
would cut short those that still save. It also replaces the handlers of signals, and calls the first rank
that it finds dead the cause.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore

from stages.interruption import EXIT_INTERRUPTED, STOP_FILE
from stages.rank_process import ERROR_FILE, EXIT_LOST_PEER

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.05
# From a rank's failure to SIGKILL for the others. Those in a collective of gloo leave by themselves at once;
# those in one of NCCL, or in a compiler, know nothing of it. SIGTERM would not help: without the one that
# failed they cannot save.
_GRACE_SECONDS = 15.0
# From SIGKILL on: a process that the kernel does not let go, such as one in a GPU's driver, is left behind.
_REAP_SECONDS = 30.0
# From one rank's stop until the others, who save or end with it, are told too.
_TELL_SECONDS = 60.0
# A process group may get one signal twice; see stages.interruption.
_SAME_SIGNAL_SECONDS = 0.3

_OUTCOME = "`dvc repro` goes on from the last checkpoint"
_HINTS = {
    signal.SIGKILL: " (out of host memory?)",
    signal.SIGBUS: " (is /dev/shm full?)",
    signal.SIGABRT: " (a collective that took longer than hardware.collective_timeout_minutes?)",
}
_PR_SET_PDEATHSIG = 1


def launch_ranks(name: str, count: int, arguments: Sequence[str], outcome: str = _OUTCOME) -> int:
    """Run `python ARGUMENTS` once per rank until all have ended.

    SIGTERM and SIGINT to this process reach every rank once; they are waited for as long as they save. Any
    more than that ends them at once. The ranks get the signals from here alone: each is the leader of its
    own process group, and starts with both ignored until it handles them (`stop_signals`, which finds the
    stop that came before by STOP_FILE). They end with this process, however that ends.

    Args:
        name: of what runs, such as "train baseline"; begins the line on stderr.
        count: ranks, at least 1.
        arguments: of the interpreter, such as ["-m", "stages.train", "baseline"].
        outcome: how to go on after a stop or a killed rank; ends the line.

    Returns:
        The exit status: 0 when all are complete; 75 when they were stopped and none failed; 128 + the
        signal's number after a second signal; 1 when a rank failed. Rank 0 prints the line of its own 75;
        of anything else there is one line here.

    Raises:
        ValueError: this is not the main thread.
        OSError: a process cannot be started; none is left.
    """
    with tempfile.TemporaryDirectory(prefix="frugal-ranks-") as folder, _StopRequests().heard() as requests:
        launch = _Launch(name, outcome, Path(folder), requests)
        try:
            store = _loopback_store()  # lives as long as the ranks
            launch.start(count, arguments, store.port)
            return launch.wait()
        finally:
            launch.kill()


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    error_file: Path
    ended_at: float = math.inf
    """When it was first seen to have ended, by time.monotonic()."""
    is_killed: bool = False
    """By the launcher."""

    def is_running(self) -> bool:
        if self.process.poll() is None:
            return True
        self.ended_at = min(self.ended_at, time.monotonic())
        return False

    def status(self) -> int | None:
        """None while it runs; a signal's number with a minus."""
        return self.process.returncode

    def record(self) -> tuple[str, str] | None:
        """What `record_failure` left: the message, and the traceback where it has one."""
        try:
            message = json.loads(self.error_file.read_text(encoding="utf-8"))["message"]
            return message["message"], message["extraInfo"]["py_callstack"].partition("\n")[2]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class _StopRequests:
    """The signals that this process got. It sleeps and polls, so that Python runs its handlers soon."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.again: signal.Signals | None = None
        self._first_at = 0.0

    @contextlib.contextmanager
    def heard(self) -> Iterator["_StopRequests"]:
        """In place of any other handlers, which come back."""
        old_wakeup = signal.set_wakeup_fd(-1)
        old_handlers = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield self
        finally:
            if self.first is not None:  # its double is not for the old handlers
                time.sleep(max(0.0, self._first_at + _SAME_SIGNAL_SECONDS - time.monotonic()))
            for number, handler in old_handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
            signal.set_wakeup_fd(old_wakeup)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif now - self._first_at >= _SAME_SIGNAL_SECONDS:
            self.again = signal.Signals(number)


@dataclass
class _Launch:
    name: str
    outcome: str
    folder: Path
    requests: _StopRequests
    ranks: list[_Rank] = field(default_factory=list)

    def start(self, count: int, arguments: Sequence[str], port: int) -> None:
        common = _common_environment(count, port) | {STOP_FILE: str(self._stop_file)}
        prepare = _preparation()
        for number in range(count):
            error_file = self.folder / f"rank-{number}.json"
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=common | _own_environment(number) | {ERROR_FILE: str(error_file)},
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=prepare,
            )
            self.ranks.append(_Rank(number, process, error_file))

    def wait(self) -> int:
        is_told, kill_at, give_up_at, tell_at = False, None, None, None
        while running := [rank for rank in self.ranks if rank.is_running()]:
            now = time.monotonic()
            if self.requests.again is not None:
                self.kill()
                self._say(f"{self.requests.again.name} again, stopped at once")
                return 128 + self.requests.again
            # One that was stopped before its first step was complete leaves the others waiting on their GPUs.
            if tell_at is None and self._is_stopped():
                tell_at = now + _TELL_SECONDS
            is_late = tell_at is not None and now >= tell_at
            stop = self.requests.first or (signal.SIGTERM if is_late else None)
            if stop is not None and not is_told:
                is_told = True
                self._stop_file.touch()  # first, for a rank that has no handler yet
                for rank in running:
                    rank.process.send_signal(stop)
            if kill_at is None and any(map(_has_failed, self.ranks)):
                kill_at = now + _GRACE_SECONDS
            if give_up_at is None and kill_at is not None and now >= kill_at:
                give_up_at = now + _REAP_SECONDS
                self._signal_kill(running)
            if give_up_at is not None and now >= give_up_at:
                break
            time.sleep(_POLL_SECONDS)
        return self._result()

    def kill(self) -> None:
        """End what still runs."""
        running = [rank for rank in self.ranks if rank.is_running()]
        self._signal_kill(running)
        deadline = time.monotonic() + _REAP_SECONDS
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    def _signal_kill(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            rank.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)  # with what it started

    def _is_stopped(self) -> bool:
        return any(rank.status() == EXIT_INTERRUPTED for rank in self.ranks)

    def _result(self) -> int:
        failed = [rank for rank in self.ranks if _has_failed(rank) and not rank.is_killed]
        cause = min(failed, key=_innocence, default=None)
        if self._is_stopped() and (cause is None or cause.status() == EXIT_LOST_PEER):
            # One that was stopped before it knew the others is lost to them.
            if self.ranks[0].status() != EXIT_INTERRUPTED:
                self._say(f"stopped; {self.outcome}")
            return EXIT_INTERRUPTED
        if cause is None:
            return 0
        self._tell(cause)
        return 1

    def _tell(self, cause: _Rank) -> None:
        status, record = cause.status(), cause.record()
        assert status is not None
        who = f"rank {cause.number} of {len(self.ranks)}"
        if status < 0:
            self._say(f"{who} was killed by {_signal_name(status)}; {self.outcome}")
        elif status == EXIT_LOST_PEER:
            unanswering = [f"rank {rank.number}" for rank in self.ranks if rank.is_killed]
            did_not_end = f"; {' and '.join(unanswering)} did not end" if unanswering else ""
            self._say(
                f"{who}: {record[0] if record else 'another rank is gone'}{did_not_end}; {self.outcome}"
            )
        elif record is None:
            self._say(f"{who} left with exit status {status}; {self.outcome}")
        else:
            message, trace = record
            is_everyones = all((rank.record() or ("",))[0] == message for rank in self.ranks)
            if trace:
                print(trace, file=sys.stderr)
            self._say(message if is_everyones else f"{who}: {message}")

    def _say(self, what: str) -> None:
        start = "\n" if sys.stderr.isatty() else ""  # below rank 0's progress bar
        print(f"{start}{self.name}: {what}", file=sys.stderr, flush=True)
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # the bar hides the cursor


def _has_failed(rank: _Rank) -> bool:
    return rank.status() not in (None, 0, EXIT_INTERRUPTED)


def _innocence(rank: _Rank) -> tuple[int, float]:
    """The less, the likelier this rank is the cause of all the failures."""
    status = rank.status()
    assert status is not None
    if status == -signal.SIGABRT:  # NCCL's watchdog, when a collective timed out or another rank is gone
        order = 2
    elif status < 0:  # no other rank's end does that
        order = 0
    else:
        order = 3 if status == EXIT_LOST_PEER else 1
    return order, rank.ended_at


def _signal_name(status: int) -> str:
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"signal {-status}"
    return f"{number.name}{_HINTS.get(number, '')}"


def _loopback_store() -> TCPStore:
    """The store where the ranks find each other, on a free port that no other machine reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _common_environment(count: int, port: int) -> dict[str, str]:
    """Of every rank, as torchrun makes it."""
    environment = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "ROLE_WORLD_SIZE": str(count),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    chosen = {  # unless the user did
        "OMP_NUM_THREADS": str(max(1, _cores() // count)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # every rank warns of the sockets of one that is gone
    }
    if sys.platform == "linux":
        chosen["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine may not resolve
    return chosen | os.environ | environment


def _own_environment(number: int) -> dict[str, str]:
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _preparation() -> Callable[[], None]:
    """What a rank does between fork and exec: as little as that, with all it needs made before."""
    set_death_signal: Callable[..., Any] | None = None
    if sys.platform == "linux":
        set_death_signal = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def prepare() -> None:
        for number in (*_SIGNALS, signal.SIGTTOU):  # the last: a terminal may stop other groups that write
            signal.signal(number, signal.SIG_IGN)
        if set_death_signal is not None:
            set_death_signal(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before
                os._exit(EXIT_LOST_PEER)

    return prepare
