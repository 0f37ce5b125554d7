"""Figures against the budget: a curve with a band for each method, a horizontal line for each cell without a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.errors import counted
from kvbench.report.plots import style
from kvbench.report.plots.captions import panels
from kvbench.report.plots.curves import axis, curves
from kvbench.report.plots.figure import Figure, Point, Spec, distinct
from kvbench.report.plots.points import only

RULE = "Shown as horizontal lines: {methods}, without a budget."
APART = "Points at the same budget are shifted sideways, so that no bar hides another."
MARKED = "*: generated entries are not bounded by the budget."
CROWDED = 0.35  # points of one budget spread over at most this share of the distance to the next budget
STEP = 0.05  # largest distance between two points of one budget, in doublings of the budget
BESIDE = 1.25  # factor by which the axis extends beyond the smallest and the largest budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A quantity that figures show against the budget. `field`: the name of the field in which each point has its
    value. `low`, `high`: the names of the fields with the ends of the error bars; empty without error bars.

    Parts of the caption: `shows` names the values, `bands` explains the error bars, `more` is a further sentence, and
    `about_missing` says why cells are not shown.
    """

    name: str
    title: str
    axis: str
    field: str
    low: str = ""
    high: str = ""
    shows: str
    bands: str
    more: str = ""
    form: str = ""  # format of the numbers at the axis; empty: as many digits as they need
    together: bool = True  # whether all panels share one y axis
    about_missing: str


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit in which budgets are given: entries, or a share of the prompt."""

    field: str
    suffix: str
    title: str
    axis: str
    factor: float


UNITS = (
    _Unit("budget", "budget", "against budget", "budget (entries per layer and KV head)", 1),
    _Unit("budget_share", "share", "against budget as a share of the prompt", "budget (% of the prompt)", 100),
)


def against_budgets(measure: Measure, points: Sequence[Point], methods: Sequence[str]) -> Iterator[Figure]:
    """Yield a figure for budgets in entries, and another for budgets as shares of the prompt. A figure without points
    is left out. methods: all methods of the report, in the order of their colours."""
    known = [p for p in points if p[measure.field] is not None]
    for unit in UNITS:
        at = [p | {"kind": "cell", "x": p[unit.field] * unit.factor} for p in known if p[unit.field] is not None]
        if not at:
            continue
        there = distinct(at, "panel")
        rules = [p | {"kind": "rule"} for p in known if _unbudgeted(p) and p["panel"] in there]
        other = sum(p[unit.field] is None and not _unbudgeted(p) for p in known)
        title = f"{measure.title} {unit.title}"
        caption = " ".join(_caption(measure, unit, at, rules, len(points) - len(known), other))
        yield Figure(f"{measure.name}-{unit.suffix}", title, caption, _spec(measure, unit, title, at, rules, methods))


def _unbudgeted(point: Point) -> bool:
    return point["budget"] is None and point["budget_share"] is None


def _caption(
    measure: Measure, unit: _Unit, at: Sequence[Point], rules: Sequence[Point], missing: int, other: int
) -> Iterator[str]:
    yield f"{measure.shows} against {unit.axis}, {panels([*at, *rules])}; {measure.bands}."
    if measure.more:
        yield measure.more
    yield APART
    if rules:
        yield RULE.format(methods=", ".join(distinct(rules, "method")))
    if missing:
        yield f"Not shown: {counted(missing, 'cell')} {measure.about_missing}."
    if other:
        yield f"Not shown here: {counted(other, 'cell')} with budgets in another unit."
    if any(p["method"].endswith(" *") for p in at):
        yield MARKED


def _spec(
    measure: Measure, unit: _Unit, title: str, at: Sequence[Point], rules: Sequence[Point], methods: Sequence[str]
) -> Spec:
    high = measure.high or measure.field
    top = max(value for p in [*at, *rules] for value in (p[measure.field], p[high]) if value is not None)
    scale: Spec = {"domain": [0, top or 1], "nice": 5} if measure.together else {"zero": True, "nice": 5}
    return curves(
        title,
        only([*rules, *_apart(at)], "kind", "x", measure.field, measure.low, measure.high),
        x=_axis(unit, distinct(at, "x")),
        y=axis(
            measure.field,
            measure.axis,
            scale=scale,
            axis={"tickCount": 5, **({"format": measure.form} if measure.form else {})},
        ),
        looks=style.methods(methods, distinct([*rules, *at], "method")),
        low=measure.low,
        high=measure.high,
        hints=("task", "cell", "questions", "progress"),
        together=measure.together,
    )


def _axis(unit: _Unit, budgets: Sequence[float]) -> Spec:
    """Return the x axis, with a mark at each budget."""
    marks = sorted(budgets)
    scale = {"type": "log", "base": 2, "domain": [marks[0] / BESIDE, marks[-1] * BESIDE], "nice": False}
    lines = {"values": marks, "format": ",~r", "labelOverlap": "greedy", "grid": False}
    return axis("x", unit.axis, scale=scale, axis=lines)


def _apart(at: Sequence[Point]) -> list[Point]:
    """Return the points moved sideways, so that they do not hide each other. `x` changes by the same factor for all
    points of a method."""
    methods = sorted(distinct(at, "method"))
    logs = [math.log2(budget) for budget in sorted(distinct(at, "x"))]
    room = min((b - a for a, b in itertools.pairwise(logs)), default=0.5) * CROWDED
    step = min(STEP, room / max(1, len(methods) - 1))
    middle = (len(methods) - 1) / 2
    return [p | {"x": p["x"] * 2 ** ((methods.index(p["method"]) - middle) * step)} for p in at]
