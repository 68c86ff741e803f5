"""A process from its start to its end: seconds, CPU, and the memory of all that it started."""

import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SECONDS_BETWEEN_LOOKS = 0.05


class ProcessError(RuntimeError):
    """It failed; the message has its last lines."""


@dataclass(frozen=True)
class Spread:
    """Median with the smallest and the largest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = "{:.2f}", unit: float = 1.0) -> str:
        median, lowest, highest = (
            form.format(value / unit) for value in (self.median, self.lowest, self.highest)
        )
        return median if lowest == highest else f"{median} [{lowest} to {highest}]"


@dataclass(frozen=True)
class Finished:
    """One process that ended with status 0."""

    seconds: float
    cpu_seconds: float
    """Its own and those of processes that it waited for."""
    peak_bytes: int | None
    """Highest proportional set size (Pss) of it and its descendants together, looked at every 50 ms: shared
    pages count once. None where nobody looked."""
    output: str


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], *, watch_memory: bool = False
) -> Finished:
    """
    Args:
        watch_memory: look at its memory while it runs, which costs it a little.

    Raises:
        ProcessError: it could not be started or its status is not 0.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as process:
            peak = _watch(process) if watch_memory else None
            status = process.wait()
            seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        last = "\n".join(text.strip().splitlines()[-15:])
        raise ProcessError(f"`{' '.join(command)}` ended with status {status}:\n{last}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(seconds, cpu, peak, text)


def _watch(process: subprocess.Popen[bytes]) -> int:
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_pss_bytes(pid) for pid in _tree(process.pid)))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:
        return  # ended in the meantime


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # ended in the meantime
    return 0
