"""The picture of the side-by-side runs: tokens/s and peak memory of every contender in every technique."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.peer_summary import BYTES_PER_PARAMETER, Row, Spread
from benchmarks.peer_table import Conditions, rounds
from benchmarks.peer_works import CONTENDERS, TECHNIQUES, TITLES
from stages.report.figure_frame import png, titles
from stages.report.style import LIGHT, Theme

_WIDTH_INCHES = 11.0
_LANE_INCHES = 0.15
"""Each contender has a lane of its own in a technique's row."""
_COLOURS = {"frugal": 1, "trainer": 2, "litgpt": 3, "tutorial": 0}
"""Places in the palette; this project is blue."""


def write_figure(path: Path, rows: Sequence[Row], parameters: dict[str, int], page: Conditions) -> None:
    """
    Args:
        parameters: of each work that `rows` are about.
    """
    # "default" first: a matplotlibrc of the user's must not change it.
    with matplotlib.style.context(["default", LIGHT.settings()]):
        path.write_bytes(png(draw(rows, parameters, page, LIGHT)))


def draw(rows: Sequence[Row], parameters: dict[str, int], page: Conditions, theme: Theme) -> Figure:
    works = [work for work in parameters if any(row.work == work for row in rows)]
    techniques = {work: _techniques(rows, work) for work in works}
    gap, below, above = 0.95, 0.95, 1.05
    heights = {work: len(techniques[work]) * (len(CONTENDERS) + 1) * _LANE_INCHES + 0.1 for work in works}
    height = sum(heights.values()) + gap * (len(works) - 1) + below + above
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    cpu = f", {page.threads} threads" if page.kind == "cpu" else ""
    titles(
        figure,
        theme,
        "Tokens per second and peak memory, side by side",
        f"{page.device}{cpu}, {page.date}; medians of {rounds(rows)}, with the lowest and highest; "
        "shaded: weights, gradients and moments",
    )
    top = height - above
    for work in works:
        bottom = top - heights[work]
        for left, column in ((0.175, 0), (0.60, 1)):
            axes = figure.add_axes((left, bottom / height, 0.375, heights[work] / height))
            own = [row for row in rows if row.work == work]
            if column == 0:
                _speed(axes, own, techniques[work], work, theme)
            else:
                standing = BYTES_PER_PARAMETER * parameters[work] / 2**20
                _memory(axes, own, techniques[work], standing, work, theme)
                axes.set_yticklabels([])
        top = bottom - gap
    _legend(figure, theme, height)
    return figure


def _techniques(rows: Sequence[Row], work: str) -> list[str]:
    found = {row.technique for row in rows if row.work == work}
    return [name for name in TECHNIQUES if name in found]


def _speed(axes: Axes, rows: Sequence[Row], techniques: list[str], work: str, theme: Theme) -> None:
    spreads = [(row, row.tokens_per_second) for row in rows if row.tokens_per_second]
    _points(axes, spreads, techniques, 1.0, theme)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{work}: tokens/s")


def _memory(
    axes: Axes, rows: Sequence[Row], techniques: list[str], standing: float, work: str, theme: Theme
) -> None:
    spreads = [(row, row.peak_bytes) for row in rows if row.peak_bytes]
    _points(axes, spreads, techniques, 2**20, theme)
    axes.axvspan(0, standing, color=theme.grid, alpha=0.6, linewidth=0, zorder=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{work}: peak memory, MiB")


def _points(
    axes: Axes,
    spreads: Sequence[tuple[Row, Spread]],
    techniques: list[str],
    unit: float,
    theme: Theme,
) -> None:
    """One lane for each contender; hollow as it comes, full with every switch."""
    lanes = len(CONTENDERS) + 1
    for row, spread in spreads:
        place = techniques.index(row.technique) * lanes + CONTENDERS.index(row.entry.contender)
        colour = theme.colour(_COLOURS[row.entry.contender])
        axes.plot(
            [spread.lowest / unit, spread.highest / unit],
            [place, place],
            color=colour,
            linewidth=1.2,
            alpha=0.55,
        )
        axes.plot(
            spread.median / unit,
            place,
            "o",
            markersize=6.5,
            color=colour if row.entry.switched else theme.background,
            markeredgecolor=colour,
            markeredgewidth=1.4,
            zorder=3 if row.entry.switched else 2.5,
        )
    middles = [place * lanes + (len(CONTENDERS) - 1) / 2 for place in range(len(techniques))]
    axes.set_yticks(middles, [_label(name) for name in techniques])
    for place in range(1, len(techniques)):
        axes.axhline(place * lanes - 1, color=theme.grid, linewidth=0.8)
    axes.set_ylim(len(techniques) * lanes - 1, -1)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label(technique: str) -> str:
    """Two words to a line: `amp + compile`, below it `+ accumulate`."""
    words = technique.split("_")
    return "\n+ ".join(" + ".join(words[place : place + 2]) for place in range(0, len(words), 2))


def _legend(figure: Figure, theme: Theme, height: float) -> None:
    marks = [
        Line2D(
            [], [], marker="o", linestyle="", markersize=6.5, color=theme.colour(place), label=TITLES[name]
        )
        for name, place in _COLOURS.items()
    ]
    for label, face in (("as it comes", theme.background), ("with every switch", theme.muted)):
        marks.append(
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                markersize=6.5,
                color=face,
                markeredgecolor=theme.muted,
                markeredgewidth=1.4,
                label=label,
            )
        )
    figure.legend(
        handles=marks,
        loc="lower center",
        ncols=len(marks),
        frameon=False,
        fontsize=9.5,
        bbox_to_anchor=(0.5, 0.06 / height),
        handletextpad=0.2,
    )
