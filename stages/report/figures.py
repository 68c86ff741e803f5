"""The figures as PNG bytes: loss against tokens and wall-clock, memory bars and timelines, speed bars.

The same comparison gives the same bytes (no date, no version in the file).
"""

from collections.abc import Callable

import matplotlib.style
from matplotlib.figure import Figure

from stages.report.bar_figures import memory_bars, speed_bars
from stages.report.figure_frame import LEFT, WIDTH_INCHES, png, titles
from stages.report.loss_figures import loss_by_time, loss_by_tokens
from stages.report.memory_timeline import plot_timelines
from stages.report.rows import Comparison
from stages.report.style import LIGHT, Theme

FIGURES = ("loss_by_tokens", "loss_by_time", "memory", "memory_timeline", "speed")
"""File names without their ending, in the order of the report."""


def draw_figures(comparison: Comparison, theme: Theme = LIGHT) -> dict[str, bytes]:
    """Name in `FIGURES` -> PNG."""
    drawings: dict[str, Callable[[Comparison, Theme], Figure]] = {
        "loss_by_tokens": loss_by_tokens,
        "loss_by_time": loss_by_time,
        "memory": memory_bars,
        "memory_timeline": _memory_timeline,
        "speed": speed_bars,
    }
    images = {}
    # "default" first: a matplotlibrc of the user's must not change the report.
    with matplotlib.style.context(["default", theme.settings()]):
        for name in FIGURES:
            images[name] = png(drawings[name](comparison, theme))
    return images


def _memory_timeline(comparison: Comparison, theme: Theme) -> Figure:
    timelines = {row.variant: comparison.results[row.variant].memory_timeline for row in comparison.rows}
    figure = Figure(figsize=(WIDTH_INCHES, 1.5 + 2.5 * -(-len(timelines) // 2)))
    top = titles(figure, theme, "Memory over one step", "predicted live tensor bytes, the peak marked")
    plot_timelines(figure, timelines, theme, left=LEFT, top=top)
    return figure
