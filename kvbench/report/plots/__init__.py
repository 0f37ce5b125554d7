"""Figures: Vega-Lite specifications with their data inline, drawn by vl-convert without a browser.

    from kvbench.report.plots import figures, svg, write

    write(figures(ScoreReport.make(load([run]))), Path("plots"))     # per figure: NAME.svg, NAME.pdf, NAME.txt

`report`, `bench`, `train` and the analyses of `replay` all draw with this package. A page may also show the
specifications interactively, with `style.config(theme)` as their configuration: vega-embed with `ast: true` runs them
under a content security policy without `unsafe-eval`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.report.plots.draw import check, png, svg
from kvbench.report.plots.figure import Figure
from kvbench.report.plots.files import write

if TYPE_CHECKING:
    from kvbench.report.scores import ScoreReport

__all__ = ["Figure", "check", "figures", "png", "svg", "write"]


def figures(report: ScoreReport) -> list[Figure]:
    """Return the figures for which a report's rows have data, in reading order."""
    from kvbench.report.plots.catalogue import figures  # imports the report's tables, which other figures do not need

    return figures(report)
