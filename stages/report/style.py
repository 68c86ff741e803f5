"""How the figures look: colours for light and dark pages, fonts, lines."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Theme:
    """Colours of one figure."""

    background: str
    ink: str
    muted: str
    grid: str
    palette: tuple[str, ...]
    """By a variant's place in params.yaml; the reference is grey, so that the others stand out."""

    def colour(self, place: int) -> str:
        return self.palette[place % len(self.palette)]

    def line_style(self, place: int) -> str:
        """Solid, and other dashes each time the colours have been used up."""
        return ("-", "--", ":", "-.")[place // len(self.palette) % 4]

    def settings(self) -> dict[str, Any]:
        """matplotlib's rcParams, on top of its defaults."""
        return {
            "font.family": "DejaVu Sans",
            "font.size": 10.5,
            "text.parse_math": False,
            "text.color": self.ink,
            "axes.edgecolor": self.grid,
            "axes.facecolor": self.background,
            "axes.labelcolor": self.muted,
            "axes.labelsize": 10,
            "axes.linewidth": 1.0,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.unicode_minus": True,
            "figure.facecolor": self.background,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "lines.solid_capstyle": "round",
            "lines.solid_joinstyle": "round",
            "savefig.facecolor": self.background,
            "xtick.color": self.grid,
            "ytick.color": self.grid,
            "xtick.labelcolor": self.muted,
            "ytick.labelcolor": self.muted,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "xtick.major.pad": 6,
            "ytick.major.pad": 6,
        }


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2933",
    muted="#64707d",
    grid="#e3e7ec",
    palette=("#7b8794", "#2f6fdd", "#d9730d", "#0f9d76", "#c2357f", "#7a52cc", "#0c93ad", "#b3392f"),
)
DARK = Theme(
    background="#161b22",
    ink="#e6eaef",
    muted="#9aa6b2",
    grid="#2c343e",
    palette=("#97a3b0", "#6aa1ff", "#f2a04a", "#3ecfa3", "#f075b5", "#ab8cf5", "#4ec6de", "#f0857b"),
)
