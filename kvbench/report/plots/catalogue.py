"""The figures of a report, in the order in which they are read."""

from __future__ import annotations

from kvbench.report.plots.figure import Figure
from kvbench.report.plots.scores import score_figures
from kvbench.report.scores import ScoreReport


def figures(report: ScoreReport) -> list[Figure]:
    """The figures for which the report's rows have data."""
    return [*score_figures(report)]
