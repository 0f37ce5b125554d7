"""Scores against measured bytes, with the frontier: the cells that no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvbench.report.plots import style
from kvbench.report.plots.curves import axis, facets, tooltip, where
from kvbench.report.plots.figure import Figure, Point, Spec, distinct
from kvbench.report.plots.points import only

TITLE = "Score against measured bytes"
ABOUT = (
    "Mean score against the largest KV bytes of a sequence, a mean over samples; n: questions. Bars: 95% intervals "
    "over questions, as in the table. Grey steps and rings: the frontier, cells that no other cell of the panel beats "
    "with at most as many bytes; it ignores the intervals. Lines join the budgets of a method."
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
WIDE = 8  # from this ratio of the most bytes to the fewest on, the axis is logarithmic


def frontier_figures(points: Sequence[Point], methods: Sequence[str]) -> Iterator[Figure]:
    """The figure, where two cells or more have bytes and a score. methods: as for `against_budgets`."""
    known = [p for p in points if p["mean"] is not None and p["kv_bytes_peak"]]
    if len(known) < 2:
        return
    missing = len(points) - len(known)
    left_out = f" Not shown: {missing} of {len(points)} cells, without a score or bytes." if missing else ""
    yield Figure("score-bytes", TITLE, ABOUT + left_out, _spec(known, methods))


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points of one panel that have a higher score than all with as many or fewer bytes, fewest bytes first."""
    best, found = -math.inf, []
    for point in sorted(points, key=lambda p: (p["kv_bytes_peak"], -p["mean"])):
        if point["mean"] > best:
            best = point["mean"]
            found.append(point)
    return found


def _spec(known: Sequence[Point], methods: Sequence[str]) -> Spec:
    most, least = (f(p["kv_bytes_peak"] for p in known) for f in (max, min))
    power = min(int(math.log(most, 1024)), len(UNITS) - 1)
    sized = [_sized(p, power) for p in known]
    edge = [
        {**p, "kind": "frontier"}
        for panel in distinct(sized, "panel")
        for p in frontier([p for p in sized if p["panel"] == panel])
    ]
    shown = distinct(known, "method")
    looks = style.methods(methods, shown)
    unit = 1024**power
    x = axis(
        "x",
        f"KV bytes of a sequence at the peak ({UNITS[power]})",
        scale=_scale(least / unit, most / unit),
        axis={"format": ",~r", "grid": False, "tickCount": 6, "labelOverlap": "greedy"},
    )
    top = max(max(p["mean"], p.get("high", 0)) for p in sized)
    y = axis("mean", "score", scale={"domain": [0, top or 1], "nice": 5}, axis={"format": ".1f"})
    score, bar = {"x": x, "y": y}, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    order = {"field": "x", "type": "quantitative"}
    hints = tooltip("task", "cell", "mean", "low", "high", "kv_bytes_peak", "questions", "progress")
    steps = {"type": "line", "interpolate": "step-after", "strokeWidth": 5, "opacity": 0.4, "color": style.MARK}
    ring = {"type": "point", "size": 190, "filled": False, "strokeWidth": 2, "opacity": 0.7, "color": style.MARK}
    colour = looks["color"]
    layers = [
        where("frontier", steps, **score, order=order),
        where("frontier", ring, **score),
        where("cell", {"type": "rule", "opacity": 0.6}, **bar, color=colour),
        where(
            "cell", {"type": "line", "strokeWidth": 1, "opacity": 0.7}, **score, order=order, color=colour,
            strokeDash=looks["strokeDash"],
        ),
        where(
            "cell", {"type": "point", "filled": True, "size": 45, "opacity": 1}, **score, color=colour,
            shape=looks["shape"], tooltip=hints,
        ),
    ]  # fmt: skip
    return facets(TITLE, [*edge, *sized], layers)


def _sized(point: Point, power: int) -> Point:
    """The point's fields that the figure needs; `x`: its bytes in the unit of the axis."""
    x = point["kv_bytes_peak"] / 1024**power
    return only([point | {"kind": "cell", "x": x}], "kind", "x", "mean", "low", "high", "kv_bytes_peak")[0]


def _scale(least: float, most: float) -> Spec:
    if most / least < WIDE:
        return {"domain": [0, most * 1.03], "nice": False}
    return {"type": "log", "base": 2, "domain": [least / 1.1, most * 1.1], "nice": False}
