"""Training loss against tokens and against wall-clock time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from stages.report import units
from stages.report.figure_frame import LEFT, WIDTH_INCHES, plain_count, plate, titles, where
from stages.report.inputs import Curve
from stages.report.rows import Comparison
from stages.report.style import Theme

_RAW_POINTS = 150
"""Curves with more points than this are smoothed, and the figure says so."""


def loss_by_tokens(comparison: Comparison, theme: Theme) -> Figure:
    """Every curve over the tokens it has seen; below, what differs from the reference."""
    several = len(comparison.rows) > 1
    figure = Figure(figsize=(WIDTH_INCHES, 6.4 if several else 4.6))
    note = f"nats per token, {where(comparison.devices)}{_smoothing_note(comparison)}"
    height = titles(figure, theme, "Training loss against tokens", note)
    longest_name = max(len(row.variant) for row in comparison.rows)
    grid = figure.add_gridspec(
        2 if several else 1,
        1,
        height_ratios=[2.4, 1] if several else [1],
        left=LEFT,
        right=max(0.93 - 0.0088 * longest_name, 0.5),
        top=height,
        bottom=0.095 if several else 0.13,
        hspace=0.34,
    )
    loss_axes = figure.add_subplot(grid[0])
    loss_axes.grid(axis="y")
    for place, row in enumerate(comparison.rows):
        curve = comparison.results[row.variant].curve
        _curve(loss_axes, curve.tokens, curve.loss, place, theme)
    _end_labels(loss_axes, comparison, theme)
    axes = loss_axes
    if several:
        axes = figure.add_subplot(grid[1], sharex=loss_axes)
        loss_axes.tick_params(labelbottom=False)
        axes.grid(axis="y")
        _differences(axes, comparison, theme)
    axes.set_xlim(0, _last(comparison, lambda curve: curve.tokens))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_count(value)))
    axes.set_xlabel("tokens trained on")
    return figure


def loss_by_time(comparison: Comparison, theme: Theme) -> Figure:
    """Every curve over the seconds it took, with the time of each at the end."""
    figure = Figure(figsize=(WIDTH_INCHES, 4.8))
    several_devices = len(comparison.devices) > 1
    note = f"nats per token, {where(comparison.devices)}{_smoothing_note(comparison)}"
    height = titles(figure, theme, "Training loss against wall-clock time", note)
    axes = figure.add_axes((LEFT, 0.13, 0.975 - LEFT, height - 0.13))
    axes.grid(axis="y")
    longest = _last(comparison, lambda curve: curve.seconds)
    unit, size = (
        ("hours", 3600) if longest > 2 * 3600 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    )
    ends = []
    for place, row in enumerate(comparison.rows):
        curve = comparison.results[row.variant].curve
        shown = _curve(axes, curve.seconds / size, curve.loss, place, theme)
        x, y = curve.seconds[-1] / size, shown[-1]
        axes.plot(x, y, "o", color=theme.colour(place), markersize=6, zorder=5, clip_on=False)
        ends.append((curve.seconds[-1], place))
    axes.set_xlim(0, longest / size * 1.02)
    axes.set_xlabel(f"{unit} since training began, compilation included")
    # A falling loss leaves the upper right free: the names stand there, the fastest first.
    for line, (seconds, place) in enumerate(sorted(ends)):
        row = comparison.rows[place]
        text = f"{row.variant}, {row.device}" if several_devices else row.variant
        style: dict[str, Any] = {
            "transform": axes.transAxes,
            "color": theme.colour(place),
            "ha": "right",
            "va": "top",
            "bbox": plate(theme),
        }
        y = 0.985 - 0.075 * line
        axes.text(0.845, y, text, weight="bold", **style)
        axes.text(0.985, y, units.duration(seconds), **style)
    return figure


def moving_average(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean over `window` neighbours, fewer at the ends; the same length as `values`."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, mode="same") / np.convolve(np.ones_like(values), kernel, mode="same")


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to `wanted` (least squares) that are `gap` apart and within [low, high].

    With too many for the range they stand evenly, closer than `gap`. Isotonic regression of the
    places less their share of the gaps, by pooling adjacent violators (Barlow et al. 1972).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([wanted[i] - rank * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    places = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        places[i] = min(max(level[rank], low), high - (len(wanted) - 1) * gap) + rank * gap
    return places


def _differences(axes: Axes, comparison: Comparison, theme: Theme) -> None:
    """Each curve minus the reference's, at the steps both logged; the batches are the same ones."""
    reference = comparison.results[comparison.reference.variant].curve
    axes.axhline(0, color=theme.colour(0), linewidth=1.8)
    for place, row in enumerate(comparison.rows[1:], start=1):
        curve = comparison.results[row.variant].curve
        _, mine, theirs = np.intersect1d(curve.steps, reference.steps, return_indices=True)
        _curve(axes, curve.tokens[mine], curve.loss[mine] - reference.loss[theirs], place, theme)
    axes.set_title(
        f"Difference from {comparison.reference.variant} on the same batches, below zero is better",
        fontsize=9.5,
        color=theme.muted,
        loc="left",
        pad=9,
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _curve(
    axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], place: int, theme: Theme
) -> NDArray[np.float64]:
    """Draw one line and return its y values; the reference is wider, as others may cover it."""
    colour = theme.colour(place)
    if len(y) > _RAW_POINTS:
        axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.22)
        y = moving_average(y, _window(len(y)))
    width = 3.2 if place == 0 else 1.8
    axes.plot(x, y, color=colour, linewidth=width, linestyle=theme.line_style(place))
    return y


def _window(points: int) -> int:
    """An odd number of points, about 2 % of the curve."""
    return max(points // 100, 1) * 2 + 1


def _smoothing_note(comparison: Comparison) -> str:
    points = max(len(result.curve.loss) for result in comparison.results.values())
    if points <= _RAW_POINTS:
        return ""
    return f"; line: mean of {_window(points)} logged steps, faint: each one"


def _end_labels(axes: Axes, comparison: Comparison, theme: Theme) -> None:
    """Names at the right ends of the curves, moved apart where the curves end together."""
    curves = [comparison.results[row.variant].curve for row in comparison.rows]
    ends = [
        (moving_average(c.loss, _window(len(c.loss))) if len(c.loss) > _RAW_POINTS else c.loss)[-1]
        for c in curves
    ]
    low, high = axes.get_ylim()
    heights = [(end - low) / (high - low) for end in ends]
    for place, y in enumerate(spread(heights, gap=0.072, low=0.02, high=0.98)):
        colour = theme.colour(place)
        # From the curve's end to the name, with a bend where the name had to move.
        xs, ys = [1.004, 1.018, 1.028], [heights[place], y, y]
        axes.plot(xs, ys, transform=axes.transAxes, color=colour, linewidth=1, clip_on=False)
        name = comparison.rows[place].variant
        axes.text(
            1.036, y, name, transform=axes.transAxes, color=colour, va="center", weight="bold", fontsize=9
        )


def _last(comparison: Comparison, values: Callable[[Curve], NDArray[np.float64]]) -> float:
    return max(float(values(result.curve)[-1]) for result in comparison.results.values())
