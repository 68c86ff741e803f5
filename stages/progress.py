"""How far a training is, on a terminal or in a log."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stages.training.loop import CurveRow, Measurements

_SECONDS_BETWEEN_LINES = 15.0


class TrainingProgress:
    """A bar with speed, loss, learning rate, peak memory and time left; where no terminal is, a line
    now and then with the same figures."""

    def __init__(self, variant: str, num_steps: int, steps_done: int = 0):
        self._steps_done = steps_done
        self._variant, self._num_steps = variant, num_steps
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(
            variant, total=num_steps, completed=steps_done, figures="first step …"
        )
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, row: CurveRow, measurements: Measurements) -> None:
        tokens_per_second = measurements.timer.intervals[-1].tokens_per_second
        peak = "" if measurements.peak is None else f"  peak {measurements.peak.bytes / 2**20:,.0f} MiB"
        figures = f"{tokens_per_second:,.0f} tok/s  loss {row.loss:.3f}  lr {row.learning_rate:.2e}{peak}"
        self._bar.update(self._task, completed=row.step, figures=figures)
        now = time.monotonic()
        is_last = row.step == self._num_steps
        if self._bar.disable and (is_last or now - self._last_line > _SECONDS_BETWEEN_LINES):
            self._last_line = now
            left = (now - self._began) / (row.step - self._steps_done) * (self._num_steps - row.step)
            print(f"{self._variant} {row.step}/{self._num_steps}  {figures}  {left:.0f} s left", flush=True)
