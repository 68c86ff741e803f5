"""Seconds and tokens per optimizer step, from clock readings that the caller takes.

The timer reads no clock and touches no device: on a GPU the caller synchronises once per logging
interval and hands over what its clock shows; on a CPU it may do so after every step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """What a run achieved in its steady part."""

    tokens_per_second: float
    median_step_seconds: float
    steps_counted: int
    """Steps behind the two medians."""
    includes_disturbed: bool
    """True where the run was too short to leave the warm-up and disturbed intervals out."""


@dataclass(frozen=True)
class Interval:
    """Between two synchronisation points."""

    step: int
    """At its end."""
    steps: int
    tokens: int
    seconds: float
    elapsed_seconds: float
    """Training seconds up to its end, those before a restart included."""
    disturbed: bool

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class StepTimer:
    """Collects the intervals between two synchronisation points.

    Example:
        timer = StepTimer()
        timer.start(perf_counter(), step=0)
        ...
        timer.lap(perf_counter(), step=10, tokens=40_960)
        timer.lap(perf_counter(), step=20, tokens=40_960, disturbed=True)  # wrote a checkpoint
        timer.summary().tokens_per_second
    """

    def __init__(self, warmup_intervals: int = 1, before: Sequence[Interval] = ()):
        """
        Args:
            warmup_intervals: intervals after `start` that are recorded but not counted: they hold
                compilation, the allocator's first growth and cold caches.
            before: of the part of a resumed run that came before `start`.
        """
        self.warmup_intervals = warmup_intervals
        self.intervals = list(before)
        self._counted_before = len(self.intervals)
        self._elapsed_at_start = self.elapsed_seconds
        self._started: float | None = None
        self._last = 0.0
        self._step = 0

    def start(self, now: float, step: int) -> None:
        """The clock reads `now` (seconds) and `step` optimizer steps are done."""
        self._started = self._last = now
        self._step = step

    def lap(self, now: float, step: int, tokens: int, disturbed: bool = False) -> None:
        """End an interval: `step` optimizer steps are done, `tokens` were trained on since the last.

        Args:
            disturbed: something besides training fell into it (a profiled step, a checkpoint, an
                evaluation): it is recorded and not counted.

        Raises:
            ValueError: `start` was not called, the step did not advance or the clock did not.
        """
        if self._started is None:
            raise ValueError("StepTimer.lap before StepTimer.start")
        if step <= self._step or now <= self._last:
            raise ValueError(
                f"an interval must advance both step and clock: step {self._step} to {step}, "
                f"clock {self._last} to {now} s"
            )
        self.intervals.append(
            Interval(
                step=step,
                steps=step - self._step,
                tokens=tokens,
                seconds=now - self._last,
                elapsed_seconds=self._elapsed_at_start + now - self._started,
                disturbed=disturbed or len(self.intervals) - self._counted_before < self.warmup_intervals,
            )
        )
        self._last, self._step = now, step

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of training up to the last interval, those before a resume included."""
        return self.intervals[-1].elapsed_seconds if self.intervals else 0.0

    def rows(self) -> list[tuple[int, float, float]]:
        """(step, seconds since training began, tokens per second) of every interval, in order."""
        return [(i.step, i.elapsed_seconds, i.tokens_per_second) for i in self.intervals]

    def summary(self) -> Throughput:
        """Medians over steps: each step counts once, with its interval's mean.

        Raises:
            ValueError: there is no interval.
        """
        if not self.intervals:
            raise ValueError("StepTimer.summary without an interval")
        steady = [i for i in self.intervals if not i.disturbed]
        counted = steady or self.intervals
        return Throughput(
            tokens_per_second=statistics.median(_per_step(counted, [i.tokens_per_second for i in counted])),
            median_step_seconds=statistics.median(_per_step(counted, [i.seconds / i.steps for i in counted])),
            steps_counted=sum(i.steps for i in counted),
            includes_disturbed=not steady,
        )


def _per_step(intervals: list[Interval], values: list[float]) -> list[float]:
    return [value for interval, value in zip(intervals, values, strict=True) for _ in range(interval.steps)]
