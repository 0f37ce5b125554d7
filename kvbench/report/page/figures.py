"""The figures of the page, each drawn for a light and a dark ground; the stylesheet shows the one that fits.

drawn = read(report)
drawn.of("curves"), drawn.reason
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.console.redact import hide_keys
from kvbench.errors import SetupError
from kvbench.report.plots import Figure, check, figures, svg
from kvbench.report.plots.style import Theme
from kvbench.report.scores import ScoreReport

PANELS: dict[str, Callable[[str], bool]] = {  # a panel, and the names of its figures
    "curves": lambda name: name.startswith("score-"),
    "frontier": lambda name: name.startswith("frontier"),
    "lengths": lambda name: name.startswith("length"),
}
OTHERS = "figures"
THEMES: tuple[Theme, Theme] = ("light", "dark")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as SVG."""

    panel: str
    figure: Figure
    light: str
    dark: str


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures; `reason` says why none is drawn."""

    drawn: list[Drawn]
    reason: str

    def of(self, panel: str) -> list[Drawn]:
        return [drawn for drawn in self.drawn if drawn.panel == panel]


def read(report: ScoreReport) -> Figures:
    try:
        check()
    except SetupError as error:
        return Figures([], str(error))
    drawn = [Drawn(_panel(f.name), f, *(hide_keys(svg(f, theme)) for theme in THEMES)) for f in figures(report)]
    return Figures(drawn, "" if drawn else "The rows have no budgets to draw.")


def _panel(name: str) -> str:
    return next((panel for panel, owns in PANELS.items() if owns(name)), OTHERS)
