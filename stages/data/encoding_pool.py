"""Units encoded side by side, each by a process of its own with one thread.

The threads of the tokenizers library share a cache behind a lock and hand every token to one Python
interpreter; processes share nothing. They are started by spawn: a process forked after the library's threads
began waits for them for ever.
"""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from stages.data.documents import CorpusError
from stages.data.encoding import EncodingJob, encode_unit
from stages.data.sources import Unit
from stages.data.tokenizer import load_tokenizer, use_threads

# What a worker has before it: one unit in work and one to take while the parent does something else.
_UNITS_AHEAD = 2
_SECONDS_BETWEEN_MESSAGES = 0.2
# A signal to the process group ends the parent by an exception; a dead worker may be seen before it comes.
_SECONDS_FOR_A_SIGNAL = 0.5
_SECONDS_TO_LEAVE = 5.0


class EncodingError(RuntimeError):
    """A process that encodes died; one sentence says what to do."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """So much more of a unit is encoded."""

    unit: Unit
    num_bytes: int
    """UTF-8 bytes of text."""
    is_whole: bool
    """All its parts are written."""


def encode_units(job: EncodingJob, units: Sequence[Unit], workers: int) -> Generator[Encoded, None, None]:
    """Encode `units`, on `workers` cores; yields what was done as it is done.

    With fewer units than cores each process has several threads. What is written does not depend on it.
    Closing the iterator ends the processes.

    Raises:
        CorpusError: while reading.
        OSError: while writing.
        EncodingError: a process died.
    """
    processes = min(workers, len(units))
    if processes > 1:
        with contextlib.closing(_encode_in_processes(job, units, processes, workers // processes)) as events:
            yield from events
        return
    use_threads(workers)
    tokenizer = load_tokenizer(job.tokenizer)
    for unit in units:
        for num_bytes in encode_unit(job, tokenizer, unit):
            yield Encoded(unit, num_bytes, is_whole=False)
        yield Encoded(unit, 0, is_whole=True)


def _encode_in_processes(
    job: EncodingJob, units: Sequence[Unit], processes: int, threads: int
) -> Generator[Encoded, None, None]:
    workers: dict[Connection, _Worker] = {}
    waiting = iter(units)
    try:
        for _ in range(processes):
            worker = _Worker(job, threads)
            workers[worker.connection] = worker
        for worker in itertools.islice(itertools.cycle(workers.values()), _UNITS_AHEAD * processes):
            for unit in itertools.islice(waiting, 1):
                worker.give(unit)
        while busy := [worker for worker in workers.values() if worker.units]:
            ready = multiprocessing.connection.wait([worker.connection for worker in busy])
            for connection in ready:
                worker = workers[connection]  # type: ignore[index]
                event = worker.receive()
                if event.is_whole:
                    for unit in itertools.islice(waiting, 1):
                        worker.give(unit)
                yield event
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """The parent's side of a process."""

    def __init__(self, job: EncodingJob, threads: int):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.units: list[Unit] = []
        self._process: SpawnProcess = context.Process(
            target=_work, args=(job, threads, theirs), name="encode", daemon=True
        )
        # Blocked until `_work` ignores them: a signal to the group would print a traceback while it imports.
        # The start of multiprocessing's tracker unblocks them, so that comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, unit: Unit) -> None:
        self.units.append(unit)
        with contextlib.suppress(ConnectionError):  # it died; `receive` says how
            self.connection.send(unit)

    def receive(self) -> Encoded:
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError):
            time.sleep(_SECONDS_FOR_A_SIGNAL)
            self._process.join()
            raise EncodingError(self._last_words()) from None
        if isinstance(message, BaseException):
            raise message
        num_bytes, is_whole = message
        unit = self.units.pop(0) if is_whole else self.units[0]
        return Encoded(unit, num_bytes, is_whole)

    def _last_words(self) -> str:
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return (
            f"a process that encodes {how}; where memory ran out, run it with fewer (RAYON_NUM_THREADS=1), "
            "else run it again: it goes on from the parts that are written"
        )

    def end(self) -> None:
        """At once where it has units still; else it leaves by itself and cleans up what libraries left."""
        self.connection.close()
        if not self.units:
            self._process.join(_SECONDS_TO_LEAVE)
        self._process.kill()
        self._process.join()


def _work(job: EncodingJob, threads: int, connection: Connection) -> None:
    """The process: encodes the units it is sent, until there is nobody to send one."""
    # Who stops the stage signals the whole group; the parent decides what becomes of us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    use_threads(threads)
    try:
        tokenizer = load_tokenizer(job.tokenizer)
        while True:
            unit = connection.recv()
            done, told = 0, time.monotonic()
            for num_bytes in encode_unit(job, tokenizer, unit):
                done += num_bytes
                if time.monotonic() - told > _SECONDS_BETWEEN_MESSAGES:
                    connection.send((done, False))
                    done, told = 0, time.monotonic()
            connection.send((done, True))
    except (EOFError, BrokenPipeError):
        return
    except (CorpusError, OSError) as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))


def _end_with_the_parent() -> None:
    """A killed parent leaves no process behind that writes beside the next run's."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
