"""Peak memory and speed of the variants as bars."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stages.report import units
from stages.report.figure_frame import WIDTH_INCHES, plain_count, plate, titles, where
from stages.report.rows import Comparison
from stages.report.style import Theme


def memory_bars(comparison: Comparison, theme: Theme) -> Figure:
    """Measured peaks, and what was predicted before training as a mark."""
    measured = [float(row.peak_memory_bytes) for row in comparison.rows]
    predicted = [float(row.predicted_peak_memory_bytes) for row in comparison.rows]
    labels = []
    for row in comparison.rows:
        saved = row.memory_saved
        against = "" if row is comparison.reference or saved is None else _change(-saved)
        labels.append((units.memory(row.peak_memory_bytes), against))
    unit, size = units.binary_unit(max(*measured, *predicted))
    kinds = dict.fromkeys(
        row.peak_memory_kind.removeprefix("cpu: ").removeprefix("cuda: ") for row in comparison.rows
    )
    figure, axes = _bars(
        comparison, theme, "Peak memory of a training step", "; ".join(kinds), measured, labels, predicted
    )
    locator = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
    axes.set_xticks([tick * size for tick in locator.tick_values(0, axes.get_xlim()[1] / size)])
    axes.set_xlim(0, max(*measured, *predicted) * 1.3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axes.set_xlabel(unit)
    return figure


def speed_bars(comparison: Comparison, theme: Theme) -> Figure:
    """Tokens per second of the steady steps."""
    speeds = [row.tokens_per_second for row in comparison.rows]
    labels = [
        (units.rate(row.tokens_per_second), "" if row is comparison.reference else _ratio(row.speedup))
        for row in comparison.rows
    ]
    figure, axes = _bars(
        comparison, theme, "Training speed", "tokens per second, without compilation", speeds, labels, None
    )
    axes.set_xlim(0, max(speeds) * 1.3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_count(value)))
    axes.set_xlabel("tokens/s")
    return figure


def _bars(
    comparison: Comparison,
    theme: Theme,
    title: str,
    note: str,
    values: list[float],
    labels: list[tuple[str, str]],
    markers: list[float] | None,
) -> tuple[Figure, Axes]:
    """Horizontal bars in the order of the rows, each labelled (value, against the reference)."""
    rows = comparison.rows
    height = 1.75 + 0.52 * len(rows)
    figure = Figure(figsize=(WIDTH_INCHES, height))
    several_devices = len(comparison.devices) > 1
    top = titles(figure, theme, title, f"{note}, {where(comparison.devices)}")
    names = [f"{row.variant}\n{row.device}" if several_devices else row.variant for row in rows]
    longest = max(len(line) for name in names for line in name.split("\n"))
    left = min(0.04 + 0.0112 * longest, 0.42)
    axes = figure.add_axes((left, 0.62 / height, 0.97 - left, top - 0.62 / height))
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    places = range(len(rows))
    axes.barh(places, values, height=0.62, color=[theme.colour(place) for place in places])
    if markers is not None:
        axes.plot(
            markers,
            places,
            "D",
            color=theme.ink,
            markeredgecolor=theme.background,
            markeredgewidth=1.4,
            markersize=8.5,
            clip_on=False,
        )
        figure.text(
            0.97, 1 - 0.33 / height, "◆ predicted before training", ha="right", va="center", fontsize=9.5
        )
    for place, (value, (text, against)) in enumerate(zip(values, labels, strict=True)):
        end = max(value, markers[place]) if markers is not None else value
        style: dict[str, Any] = {
            "textcoords": "offset points",
            "va": "center",
            "bbox": plate(theme),
            "zorder": 1,
        }
        label = axes.annotate(text, (end, place), (10, 0), weight="bold", **style)
        if against:
            axes.annotate(against, (1, 0.5), (7, 0), xycoords=label, color=theme.muted, **style)
    axes.set_yticks(places, names)
    for place, name in enumerate(axes.get_yticklabels()):
        name.set_color(theme.colour(place))
        name.set_fontweight("bold")
        name.set_fontsize(10)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure, axes


def _change(fraction: float) -> str:
    return f"{'+' if fraction > 0 else ''}{units.percent(fraction)}"


def _ratio(speedup: float | None) -> str:
    return "" if speedup is None else units.ratio(speedup)
