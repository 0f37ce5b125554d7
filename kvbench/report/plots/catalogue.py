"""Lists all figures of a report, in reading order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.report.plots import style
from kvbench.report.plots.budgets import against_budgets
from kvbench.report.plots.figure import Figure, distinct
from kvbench.report.plots.frontier import frontier_figures
from kvbench.report.plots.maps import map_figures
from kvbench.report.plots.measures import LENGTH, SCORE, SPEED, TRUNCATED
from kvbench.report.plots.pages import pages
from kvbench.report.plots.points import points
from kvbench.report.scores import ScoreReport


def figures(report: ScoreReport) -> list[Figure]:
    """Return the figures for which the report's rows have data."""
    cells = points(report)
    methods = sorted(distinct(cells, "method"))
    found = [p | {"dash": style.dash(p["method"], methods)} for p in cells]
    costs = [SPEED, LENGTH, *([TRUNCATED] if any(p["truncated"] for p in found) else [])]
    drawn = [
        *against_budgets(SCORE, found, methods),
        *frontier_figures(found, methods),
        *map_figures(report, found),
        *(figure for measure in costs for figure in against_budgets(measure, found, methods)),
    ]
    return list(itertools.chain.from_iterable(map(pages, _named(drawn))))


def _named(figures: Sequence[Figure]) -> Iterator[Figure]:
    """Yield the figures under distinct names. Without this, maps of one family of tasks in several groups of runs would
    have the same name."""
    seen: Counter[str] = Counter()
    for figure in figures:
        seen[figure.name] += 1
        first = seen[figure.name] == 1
        yield figure if first else replace(figure, name=f"{figure.name}-group{seen[figure.name]}")
