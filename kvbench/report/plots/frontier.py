"""The figure of scores against measured bytes, with the frontier (`kvbench.report.overview.frontier`) marked in each
panel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvbench.report.plots import style
from kvbench.report.plots.captions import panels
from kvbench.report.plots.curves import SYMBOL, axis, facets, known, tooltip, where
from kvbench.report.plots.figure import Figure, Point, Spec, distinct
from kvbench.report.plots.points import only

TITLE = "Score against measured bytes"
ABOUT = (
    "Mean score over questions against a sequence's KV bytes at the peak (mean over samples), {panels}; bars: 95% "
    "intervals over questions, as in the table. Grey stairs and rings: the frontier, the cells whose score no other "
    "cell of the panel reaches with at most as many bytes; the intervals are ignored. Lines join the budgets of a "
    "method."
)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
BY_SIZE = {"field": "x", "type": "quantitative"}
STEPS = {"type": "line", "interpolate": "step-after", "strokeWidth": 5, "opacity": 0.4, "color": style.MARK}
RING = {"type": "point", "size": 190, "filled": False, "strokeWidth": 2, "opacity": 0.7, "color": style.MARK}
WIDE = 8  # the axis is logarithmic if the most bytes are at least this multiple of the fewest


def frontier_figures(points: Sequence[Point], methods: Sequence[str]) -> Iterator[Figure]:
    """Yield the figure if at least two cells have bytes and a score. methods: all methods of the report, in the order
    of their colours."""
    placed = [p for p in points if p["mean"] is not None and p["kv_bytes_peak"]]
    if len(placed) < 2:
        return
    missing = len(points) - len(placed)
    left_out = f" Not shown: {missing} of {len(points)} cells, without a score or bytes." if missing else ""
    yield Figure("score-bytes", TITLE, ABOUT.format(panels=panels(placed)) + left_out, _spec(placed, methods))


def _spec(placed: Sequence[Point], methods: Sequence[str]) -> Spec:
    most, least = (f(p["kv_bytes_peak"] for p in placed) for f in (max, min))
    power = min(int(math.log(most, 1024)), len(UNITS) - 1)
    at_size = [p | {"kind": "cell", "x": p["kv_bytes_peak"] / 1024**power} for p in placed]
    sized = only(at_size, "kind", "x", "mean", "low", "high", "kv_bytes_peak")
    edge = [s | {"kind": "frontier"} for s, p in zip(sized, placed, strict=True) if p["frontier"]]
    top = max(max(p["mean"], p.get("high", 0)) for p in sized)
    x = axis(
        "x",
        f"KV bytes of a sequence at the peak ({UNITS[power]})",
        scale=_scale(least / 1024**power, most / 1024**power),
        axis={"format": ",~r", "grid": False, "tickCount": 6, "labelOverlap": "greedy"},
    )
    y = axis("mean", "score", scale={"domain": [0, top or 1], "nice": 5}, axis={"tickCount": 5})
    return facets(TITLE, [*edge, *sized], _layers(x, y, style.methods(methods, distinct(placed, "method"))))


def _layers(x: Spec, y: Spec, looks: Spec) -> list[Spec]:
    """Return the layers from back to front: the frontier, error bars, a thin line through each method's budgets, and
    the cells' points."""
    at = {"x": x, "y": y}
    coloured = at | {"color": looks["color"]}
    bar = coloured | {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    line = coloured | {"order": BY_SIZE, "strokeDash": looks["strokeDash"]}
    tips = tooltip("task", "cell", "mean", "low", "high", "kv_bytes_peak", "questions", "progress")
    return [
        where("frontier", STEPS, **at, order=BY_SIZE),
        where("frontier", RING, **at),
        known("low", where("cell", {"type": "rule", "opacity": 0.6}, **bar)),
        where("cell", {"type": "line", "strokeWidth": 1, "opacity": 0.7}, **line),
        where("cell", SYMBOL, **coloured, shape=looks["shape"], tooltip=tips),
    ]


def _scale(least: float, most: float) -> Spec:
    if most / least < WIDE:
        return {"domain": [0, most * 1.03], "nice": False}
    return {"type": "log", "base": 2, "domain": [least / 1.1, most * 1.1], "nice": False}
