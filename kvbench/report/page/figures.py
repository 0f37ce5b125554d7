"""Draws the page's figures, each in a light and in a dark version. The stylesheet shows the version that the reader's
system prefers.

    drawn = read(report)
    drawn.of("curves")     # the figures of one panel
    drawn.reason           # why figures are missing on the page, or why there are none; otherwise ""
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.errors import SetupError
from kvbench.report.plots import Figure, check, figures, svg
from kvbench.report.scores import ScoreReport

# For each panel: whether it shows the figure with a given name. The panel "figures" shows all others.
PANELS: dict[str, Callable[[str], bool]] = {
    "frontier": lambda name: name.startswith("score-bytes"),
    "curves": lambda name: name.startswith("score-"),
    "lengths": lambda name: name.startswith(("length", "truncated")),
}
MOST_BYTES = 1_000_000  # of all pictures, light and dark


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as SVG in a light and in a dark version, and the panel of the page that shows it."""

    panel: str
    figure: Figure
    light: str
    dark: str


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that fit on the page. `reason`: why figures of the report are missing on the page, or why the report
    has no figures; otherwise empty."""

    drawn: list[Drawn]
    reason: str

    def of(self, panel: str) -> list[Drawn]:
        return [drawn for drawn in self.drawn if drawn.panel == panel]


def read(report: ScoreReport) -> Figures:
    try:
        check()
    except SetupError as error:
        return Figures([], str(error))
    drawn: list[Drawn] = []
    left, missing = MOST_BYTES, 0
    for figure in figures(report):
        light = svg(figure, "light")
        if 2 * len(light) > left:
            missing += 1
            continue
        left -= 2 * len(light)
        panel = next((panel for panel, owns in PANELS.items() if owns(figure.name)), "figures")
        drawn.append(Drawn(panel, figure, light, svg(figure, "dark")))
    more = f"{missing} figures are left out, to keep the page small; 'kvbench report --plot DIR' draws all."
    return Figures(drawn, more if missing else "" if drawn else "The rows have no budgets to draw.")
