"""Scores against budgets: a line with a band for each method, the full cache as a rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from kvbench.report.plots import panels, style
from kvbench.report.plots.cells import Point, names, points, present
from kvbench.report.plots.figure import Figure, Spec
from kvbench.report.scores import ScoreReport

ABOUT = (
    "Mean score over questions against the budget, a panel for each task; n: questions. Bands and bars: 95% intervals "
    "over questions, as in the table. Points of one budget are set apart sideways, so that no bar hides another."
)
RULE = "A horizontal line with its band: {methods}, which {has} no budget."
KINDS = {
    "entries": ("score-budget", "Score against budget", "budget (entries per layer and KV head)"),
    "share": ("score-share", "Score against budget as a share of the prompt", "budget (% of the prompt)"),
}
CROWDED = 0.35  # how much of the distance between two budgets the points of one budget take


def score_figures(report: ScoreReport) -> Iterator[Figure]:
    """A figure for budgets in entries and one for budgets as shares, where the report has them."""
    everyone = names(report.tables)
    found = [point for table in report.tables for point in points(table) if point["score"] is not None]
    for field, (name, title, x) in KINDS.items():
        scale = 100 if field == "share" else 1
        at = [p | {"kind": "cell", "budgeted": p[field] * scale} for p in found if p[field] is not None]
        if not at:
            continue
        there = set(present(at, "panel"))
        full = [p | {"kind": "rule"} for p in found if not p["budget"] and p["panel"] in there]
        caption = [ABOUT, *_rules(full), *_left_out(report, found, field)]
        yield Figure(name, title, " ".join(caption), _spec(title, _apart(at), full, everyone, x))


def _spec(title: str, at: Sequence[Point], full: Sequence[Point], everyone: Sequence[str], x: str) -> Spec:
    budgets = sorted({p["budgeted"] for p in at})
    shown = present([*full, *at])
    looks = style.methods(everyone, [name for name in everyone if name in shown], line=True)
    colour = {"color": looks["color"]}
    top = max(value for p in [*at, *full] for value in (p["score"], p["high"]) if value is not None)
    axis = {"values": budgets, "format": ",~r", "labelOverlap": "greedy", "grid": False}
    reach = 1.25
    across = {
        "field": "x",
        "type": "quantitative",
        "title": x,
        "scale": {"type": "log", "base": 2, "domain": [budgets[0] / reach, budgets[-1] * reach], "nice": False},
        "axis": axis,
    }
    score = {"field": "score", "type": "quantitative", "title": "score", "scale": {"domain": [0, top or 1], "nice": 5}}
    band = {"y": {**score, "field": "low"}, "y2": {"field": "high"}}
    hints = panels.tooltip("task", "method", "budget", "score", "low", "high", "questions")
    layers = [
        panels.where("rule", {"type": "rect", "opacity": 0.08}, **band, **colour),
        panels.where("rule", {"type": "rule", "strokeWidth": 1.5}, y=score, **colour, tooltip=hints),
        panels.where("cell", {"type": "area", "fillOpacity": 0.1}, x=across, **band, **colour),
        panels.where("cell", {"type": "rule", "opacity": 0.6}, x=across, **band, **colour),
        panels.where("cell", {"type": "line"}, x=across, y=score, **colour, strokeDash=looks["strokeDash"]),
        panels.where(
            "cell", {"type": "point", "filled": True, "size": 45, "opacity": 1}, x=across, y=score,
            **colour, shape=looks["shape"], tooltip=hints,
        ),
    ]  # fmt: skip
    values = [*full, *at]
    return panels.facets(title, values, present(values, "panel"), layers)


def _apart(at: Sequence[Point]) -> list[Point]:
    """The points with a field `x`: their budget, moved sideways by the method's place among the methods."""
    methods = sorted(present(at))
    logs = [math.log2(budget) for budget in sorted({p["budgeted"] for p in at})]
    room = min((b - a for a, b in itertools.pairwise(logs)), default=0.5) * CROWDED
    step = room / max(1, len(methods) - 1)
    middle = (len(methods) - 1) / 2
    return [p | {"x": p["budgeted"] * 2 ** ((methods.index(p["method"]) - middle) * step)} for p in at]


def _rules(full: Sequence[Point]) -> list[str]:
    methods = present(full)
    return [RULE.format(methods=", ".join(methods), has="has" if len(methods) == 1 else "have")] if methods else []


def _left_out(report: ScoreReport, found: Sequence[Point], field: str) -> list[str]:
    """Sentences on the cells that a figure does not show."""
    unscored = sum(len(table.cells) for table in report.tables) - len(found)
    other = sum(p[field] is None and bool(p["budget"]) for p in found)
    return [
        *([f"Not shown: {_cells(unscored)} without a score."] * bool(unscored)),
        *(
            [f"Not shown: {_cells(other)} with budgets in another unit, which have a figure of their own."]
            * bool(other)
        ),
        *(["*: generated entries are not bounded by the budget."] * any(p["method"].endswith(" *") for p in found)),
    ]


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"
