"""How a stage is stopped by SIGTERM or SIGINT: soon, with exit status 75, and never half-way through.

The first signal raises `Interrupted` in the main thread or, inside `StopSignals.deferred()`, waits there
for the caller to save. A second one ends the process at once. Python runs its signal handlers only
between bytecodes, and the main thread can sit in a compiler or a long product for minutes. So the C-level
handler also writes the signal into a pipe (`signal.set_wakeup_fd`), and a thread that reads it ends the
process where the main thread does not react. Native code that keeps Python's global lock stops that
thread too; torch and tokenizers release it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from stages.tracking.run_tracker import EXIT_INTERRUPTED

__all__ = ["EXIT_INTERRUPTED", "STOP_FILE", "Interrupted", "StopSignals", "run_interruptible", "stop_signals"]

STOP_FILE = "FRUGAL_STOP_FILE"
"""Environment variable: the path of a file that is there once `stages.repro` was told to stop. A signal that
comes while a stage imports its modules, or while DVC stands between two stages, reaches no handler."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# From the signal to its handler, which a main thread in native code does not run.
_GRACE_SECONDS = 3.0
# From `Interrupted` to the end of the `stop_signals` block: the `finally` blocks between them may hang.
_UNWIND_SECONDS = 30.0
# A process group may get one signal twice: from `timeout`, from a container's init and its shell.
_SAME_SIGNAL_SECONDS = 0.3

_DEFAULT_OUTCOME = "it is not complete; `dvc repro` runs it again"
_WAKE = b"\0"


class Interrupted(SystemExit):
    """A signal told this process to stop. No `except Exception` of a library swallows it."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.signal_name = signal_name


class StopSignals:
    """What `stop_signals` gives its block: whether to stop, and where that must wait."""

    def __init__(self, name: str, outcome: str, is_quiet: bool = False) -> None:
        self.requested: str | None = None
        """Name of the first signal, such as "SIGTERM"; None before."""
        self._name, self._outcome, self._is_quiet = name, outcome, is_quiet
        self._is_deferred = False
        self._is_handled = False
        self._is_ending = False
        self._first_at: float | None = None
        self._raised_at: float | None = None
        self._is_over = False
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        self._watcher = threading.Thread(target=self._watch, name="stop-signals", daemon=True)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In this block the first signal only sets `requested`; the caller looks at it where it can save.

        Leaving the block raises nothing: call `raise_if_requested` when all is saved. Not to be nested.

        Raises:
            Interrupted: a signal had come before.
        """
        self.raise_if_requested()
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def raise_if_requested(self) -> None:
        """
        Raises:
            Interrupted: a signal has come.
        """
        if self.requested is not None:
            self._raise(self.requested)

    def message(self, signal_name: str) -> str:
        """The last line of a process that a signal stopped."""
        return f"{self._name}: stopped by {signal_name}; {self._outcome}"

    def _raise(self, signal_name: str) -> None:
        self._raised_at = self._raised_at or time.monotonic()
        self._wake_watcher()
        raise Interrupted(signal_name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The Python-level handler: runs in the main thread, when that gets to it."""
        is_first, self._is_handled = not self._is_handled, True
        self.requested = self.requested or signal.Signals(number).name
        if is_first and not (self._is_deferred or self._is_ending):
            self._raise(self.requested)

    def _wake_watcher(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it too
            os.write(self._writing_end, _WAKE)

    def _watch(self) -> None:
        """The thread: reads the signals as they come and keeps the deadlines."""
        poll = select.poll()
        poll.register(self._reading_end, select.POLLIN)
        while not self._is_over:
            deadline = self._deadline()
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                self._exit_now(EXIT_INTERRUPTED, self.message(self.requested or "a signal"))
            if poll.poll(None if deadline is None else (deadline - now) * 1000):
                for number in os.read(self._reading_end, 512):
                    if number in _SIGNALS:
                        self._note(number)

    def _deadline(self) -> float | None:
        """When to end the process for the main thread, by time.monotonic()."""
        if self._raised_at is not None:
            return self._raised_at + _UNWIND_SECONDS
        if self._first_at is None or self._is_handled or self._is_deferred:
            return None
        return self._first_at + _GRACE_SECONDS

    def _note(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self.requested = self.requested or name
            if self._is_deferred and not self._is_quiet:
                _write_line(f"{name}: finishing the micro-batch and saving; again to stop at once")
        elif now - self._first_at >= _SAME_SIGNAL_SECONDS:
            self._exit_now(128 + number, f"{self._name}: {name} again, stopped at once")

    def _exit_now(self, status: int, line: str) -> None:
        _exit_now(status, None if self._is_quiet else line)

    def _stay_for_the_same_signal(self) -> None:
        """With the old handlers back, the first signal's double would kill the process with another
        status."""
        if began := self._first_at or self._raised_at:
            time.sleep(max(0.0, began + _SAME_SIGNAL_SECONDS - time.monotonic()))

    def _end(self) -> None:
        self._is_over = True
        self._wake_watcher()
        self._watcher.join()
        os.close(self._reading_end)
        os.close(self._writing_end)


@contextlib.contextmanager
def stop_signals(
    name: str = "stage", outcome: str = _DEFAULT_OUTCOME, *, is_quiet: bool = False
) -> Iterator[StopSignals]:
    """Handle SIGTERM and SIGINT in this block, in the main thread, also where they were ignored before.

    Args:
        name: of what runs, such as "train baseline"; begins the lines on stderr.
        outcome: what a stop leaves and how to go on, for the last line where the watching thread has to
            end the process. Where `Interrupted` is raised, the caller prints `message`.
        is_quiet: another process of the same work says these lines.

    Where the stop came before (see STOP_FILE), `requested` is set from the start and nothing is raised until
    the block asks by `raise_if_requested` or `deferred`.

    Raises:
        Interrupted: exit status 75, from wherever the main thread is outside `deferred()`.
        ValueError: this is not the main thread.
    """
    stop = StopSignals(name, outcome, is_quiet)
    stop._watcher.start()
    old_wakeup = signal.set_wakeup_fd(stop._writing_end, warn_on_full_buffer=False)
    old_handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}

    def restore() -> None:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)

    _restore_in_child.append(restore)
    try:
        for number in _SIGNALS:
            signal.signal(number, stop._handle)
        if Path(os.environ.get(STOP_FILE, "")).is_file():
            stop.requested = stop.requested or "SIGTERM"
        yield stop
    finally:
        stop._is_ending = True  # nothing is raised into what follows
        stop._stay_for_the_same_signal()
        restore()
        _restore_in_child.remove(restore)
        stop._end()


def run_interruptible(name: str, run: Callable[[], int], outcome: str = _DEFAULT_OUTCOME) -> int:
    """The exit status of `run()`; where a signal stopped it 75, with one line on stderr.

    For the stages that have nothing to save: what they write appears whole or not at all.
    """
    stop: StopSignals | None = None
    try:
        with stop_signals(name, outcome) as stop:
            stop.raise_if_requested()
            return run()
    except Interrupted as interrupted:
        assert stop is not None
        print(stop.message(interrupted.signal_name), file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def _write_line(line: str) -> None:
    """To the file descriptor: the main thread may hold the lock of `sys.stderr`."""
    start = "\n" if os.isatty(2) else ""  # after a progress bar or the terminal's ^C
    with contextlib.suppress(OSError):
        os.write(2, f"{start}{line}\n".encode())


def _exit_now(status: int, line: str | None) -> None:
    if line is not None:
        _write_line(line)
    if os.isatty(1):
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a progress bar hides the cursor
    os._exit(status)


# A forked worker has neither the thread nor a stage to save. It shares the pipe, so a signal to it would
# stop its parent.
_restore_in_child: list[Callable[[], None]] = []


def _restore_all_in_child() -> None:
    while _restore_in_child:
        _restore_in_child.pop()()


os.register_at_fork(after_in_child=_restore_all_in_child)
