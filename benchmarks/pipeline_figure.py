"""The picture of how the pipeline's costs grow: logarithmic on both axes, so that linear is a slope of 1."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_page import Conditions, Findings
from stages.report.figure_frame import png, titles
from stages.report.style import LIGHT, Theme

_WIDTH_INCHES, _HEIGHT_INCHES = 11.0, 5.4


def write_figure(path: Path, findings: Findings, page: Conditions) -> None:
    with matplotlib.rc_context(LIGHT.settings()):  # type: ignore[arg-type]
        path.write_bytes(png(draw(findings, page, LIGHT)))


def draw(findings: Findings, page: Conditions, theme: Theme) -> Figure:
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES))
    top = titles(
        figure,
        theme,
        "Costs as the corpus, the model and the training grow",
        f"{page.machine}; {page.date}; relative to the smallest; in brackets the exponent, 1 is linear",
    )
    panels = (
        ("corpus, times the smallest", findings.tokenizing.curves),
        ("parameters, times the smallest", findings.model_curves),
        ("steps done, times the fewest", [findings.long_run]),
    )
    for place, (label, curves) in enumerate(panels):
        axes = figure.add_axes((0.055 + 0.325 * place, 0.4, 0.27, top - 0.42))
        _panel(axes, label, curves, theme)
    return figure


def _panel(axes: Axes, label: str, curves: Sequence[Curve], theme: Theme) -> None:
    axes.plot([1, 8], [1, 8], color=theme.muted, linewidth=1, linestyle=(0, (2, 3)), label="linear")
    for place, curve in enumerate(curves):
        points = curve.lowest()
        first_size, first_cost = points[0]
        axes.plot(
            [size / first_size for size, _ in points],
            [cost / first_cost for _, cost in points],
            marker="o",
            markersize=4.5,
            linewidth=1.8,
            color=theme.colour(place + 1),
            label=f"{curve.name} ({curve.slope():.2f})",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.9, 10)
    axes.set_ylim(0.45, 20)
    for axis, marks in ((axes.xaxis, (1, 2, 4, 8)), (axes.yaxis, (0.5, 1, 2, 4, 8, 16))):
        axis.set_major_locator(FixedLocator(marks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(visible=True)
    axes.set_xlabel(label)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.12, -0.2),
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.ink,
        handlelength=1.4,
    )
