"""Memory over one step as a figure: what is alive from the first operation to the last, and the peak."""

import csv
import io
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from stages.report import units
from stages.report.figure_frame import LEFT, WIDTH_INCHES, png, titles
from stages.report.style import LIGHT, Theme

KINDS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "temporaries": "temporaries",
}
"""Column of the file -> name in the figure, from the bottom of the stack to its top."""

_COLOURS = (0, 5, 1, 3, 2, 7)
"""Places in the theme's palette."""
_STRETCHES = {
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "gradient clipping": "optimizer",
    "optimizer step": "optimizer",
}


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over one step; one entry per point."""

    events: NDArray[np.int64]
    """Allocations and releases so far."""
    phases: tuple[str, ...]
    """What ran then, such as `block 3 of 12, backward`."""
    live_bytes: Mapping[str, NDArray[np.int64]]
    """By the keys of KINDS."""

    @property
    def total(self) -> NDArray[np.int64]:
        return np.sum(list(self.live_bytes.values()), axis=0)

    @property
    def peak(self) -> int:
        """The place of the fullest point; of several the first."""
        return int(self.total.argmax())


def read_memory_timeline(text: str) -> MemoryTimeline:
    """Read the plan stage's timeline.

    Raises:
        ValueError: a column is missing, a number is none, or there are no rows.
    """
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    if not rows:
        raise ValueError("it holds no rows")
    try:
        return MemoryTimeline(
            np.array([int(row["event"]) for row in rows]),
            tuple(row["phase"] for row in rows),
            {kind: np.array([int(row[kind]) for row in rows]) for kind in KINDS},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"its rows have no {error}") from None


def draw_memory_timeline(
    title: str,
    timeline: MemoryTimeline,
    allowances: Mapping[str, int],
    capacity_bytes: int | None,
    theme: Theme = LIGHT,
) -> bytes:
    """One variant's step as PNG.

    Args:
        allowances: what the process needs beside live tensors, in bytes.
        capacity_bytes: drawn as a line, less the allowances; None draws none.
    """
    with matplotlib.style.context(["default", theme.settings()]):
        figure = Figure(figsize=(WIDTH_INCHES, 5.4))
        note = f"predicted live tensor bytes over one step; fullest at {timeline.phases[timeline.peak]}"
        top = titles(figure, theme, title, note)
        axes = figure.add_axes((LEFT, 0.1, 0.62, top - 0.1))
        limit = None if capacity_bytes is None else capacity_bytes - sum(allowances.values())
        plot_timeline(axes, timeline, theme, limit)
        _legend(figure, timeline, allowances, theme)
        return png(figure)


def kind_colours(theme: Theme) -> list[tuple[str, str]]:
    """(colour, name) of each kind, from the bottom of the stack to its top."""
    return [(theme.colour(place), name) for place, name in zip(_COLOURS, KINDS.values(), strict=True)]


def plot_timeline(
    axes: Axes,
    timeline: MemoryTimeline,
    theme: Theme,
    limit_bytes: int | None = None,
    highest_bytes: float | None = None,
) -> None:
    """The stack, the stretches of the step, and the peak with its bytes; the y axis is in a binary unit.

    Args:
        limit_bytes: drawn as a line, unless it is far above the peak.
        highest_bytes: what the axis must reach; None: the peak.
    """
    total, peak = timeline.total, timeline.peak
    highest_bytes = highest_bytes or float(total[peak])
    unit, size = units.binary_unit(highest_bytes)
    colours = [colour for colour, _ in kind_colours(theme)]
    places = np.arange(len(total))
    axes.stackplot(
        places, *(timeline.live_bytes[kind] for kind in KINDS), colors=colours, linewidth=0, step="mid"
    )
    top = highest_bytes * 1.16
    # The line of the capacity only where it is near: it must not squeeze the stack.
    if limit_bytes is not None and limit_bytes < 1.6 * total[peak]:
        top = max(top, limit_bytes * 1.06)
        axes.axhline(limit_bytes, color=theme.ink, linewidth=1.2, linestyle="--")
        axes.text(
            len(total), limit_bytes, "fits up to here ", ha="right", va="bottom", fontsize=9, color=theme.ink
        )
    axes.plot(peak, total[peak], "o", color=theme.ink, markersize=6, zorder=5, clip_on=False)
    beyond_middle = peak > 0.6 * len(total)
    axes.annotate(
        f"{units.memory(float(total[peak]))}",
        (peak, total[peak]),
        xytext=(-9 if beyond_middle else 9, 4),
        textcoords="offset points",
        ha="right" if beyond_middle else "left",
        weight="bold",
    )
    ticks = _stretches(timeline)
    for start, _, _ in ticks[1:]:
        axes.axvline(start, color=theme.muted, linewidth=0.7, linestyle=":")
    middles = [(start + end) / 2 for start, end, _ in ticks]
    at_the_edge = len(ticks) > 1 and ticks[-1][1] - ticks[-1][0] < len(total) / 4
    if at_the_edge:  # centred, its name would leave the figure
        middles[-1] = ticks[-1][1] - 1
    axes.set_xticks(middles, [name for _, _, name in ticks])
    if at_the_edge:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.set_xlim(0, len(total) - 1 or 1)
    axes.set_ylim(0, top)
    steps = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top / size)
    axes.set_yticks([tick * size for tick in steps if tick * size <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axes.set_ylabel(unit)
    axes.grid(axis="y")


def plot_timelines(
    figure: Figure, timelines: Mapping[str, MemoryTimeline], theme: Theme, left: float, top: float
) -> None:
    """One small plot per variant, two side by side, all on one scale; the kinds are named at the foot.

    Args:
        left, top: of the plots, as shares of the figure.
    """
    height = figure.get_figheight()
    columns = min(2, len(timelines))
    grid = figure.add_gridspec(
        -(-len(timelines) // columns),
        columns,
        left=left,
        right=0.975,
        top=top - 0.3 / height,
        bottom=0.95 / height,
        hspace=0.42,
        wspace=0.2,
    )
    highest = max(float(timeline.total.max()) for timeline in timelines.values())
    for place, (variant, timeline) in enumerate(timelines.items()):
        axes = figure.add_subplot(grid[place // columns, place % columns])
        plot_timeline(axes, timeline, theme, highest_bytes=highest)
        axes.set_title(variant, fontsize=9.5, loc="left", color=theme.colour(place), weight="bold")
    for place, (colour, name) in enumerate(kind_colours(theme)):
        x = left + 0.152 * place
        figure.text(x, 0.3 / height, "■", color=colour, fontsize=11, va="center")
        figure.text(x + 0.018, 0.3 / height, name, fontsize=9, va="center")


def _stretches(timeline: MemoryTimeline) -> list[tuple[int, int, str]]:
    """(first point, last point, name) of forward, backward and optimizer; too short ones have no name."""
    directions = [_STRETCHES.get(phase.rpartition(", ")[2], "") for phase in timeline.phases]
    found, start = [], 0
    for name, group in itertools.groupby(directions):
        length = len(list(group))
        if name:
            found.append((start, start + length, name if length > len(directions) / 12 else ""))
        start += length
    return found


def _legend(figure: Figure, timeline: MemoryTimeline, allowances: Mapping[str, int], theme: Theme) -> None:
    """What the peak is made of, and what is needed beside it."""
    peak = timeline.peak
    figure.text(0.735, 0.815, "at the peak", fontsize=10, color=theme.muted)
    y = 0.765
    for colour, (kind, name) in reversed(list(zip(_COLOURS, KINDS.items(), strict=True))):
        figure.text(0.735, y, "■", color=theme.colour(colour), fontsize=12, va="center")
        figure.text(0.76, y, name, va="center")
        count = int(timeline.live_bytes[kind][peak])
        figure.text(0.985, y, units.memory(count) if count else units.NONE, va="center", ha="right")
        y -= 0.05
    if not allowances:
        return
    y -= 0.03
    figure.text(0.735, y, "needed beside it", fontsize=10, color=theme.muted)
    for name, count in allowances.items():
        y -= 0.05
        figure.text(0.735, y, "\n".join(textwrap.wrap(name, 26)), va="center", fontsize=9)
        figure.text(0.985, y, units.memory(count), va="center", ha="right", fontsize=9)
        y -= 0.025 * (len(name) > 26)
