"""What all figures of the report share: width, titles, and how a number stands on an axis."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from stages.report.style import Theme

WIDTH_INCHES = 9.0
_DOTS_PER_INCH = 160
LEFT = 0.09
"""Where axes without long labels begin (0..1)."""


def png(figure: Figure) -> bytes:
    """The file's content; the same drawing gives the same bytes (no date, no version in it)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def titles(figure: Figure, theme: Theme, title: str, note: str) -> float:
    """Title and what it shows at the upper left; returns where the axes may begin (0..1)."""
    inches = figure.get_figheight()
    figure.text(0.022, 1 - 0.33 / inches, title, size=14, weight="bold", va="center")
    figure.text(0.022, 1 - 0.63 / inches, note, size=9.5, color=theme.muted, va="center")
    return 1 - 0.92 / inches


def where(devices: Sequence[str]) -> str:
    """For a note below a title: figures of a machine name it."""
    return devices[0] if len(devices) == 1 else f"on several devices: {'; '.join(devices)}"


def plate(theme: Theme) -> dict[str, Any]:
    """Behind a text, so that no grid line runs through it."""
    return {"facecolor": theme.background, "edgecolor": "none", "pad": 1.5}


def plain_count(value: float) -> str:
    """An axis number without digits that say nothing: `250 k`, `1 M`."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
