"""Draws horizontal bars in panels. A bar is stacked from parts; a bar of only one part may have an error bar."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.plots.curves import axis, facet, known, tooltip
from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import LETTER, NAMES, SCHEMA, WIDTH, across

ROW = 18  # height of a bar


def bars(title: str, values: Sequence[Point], *, x: str) -> Spec:
    """Return the figure's Vega-Lite specification. Each value is one part of a bar, with the fields panel, bar, part
    and length. If the part has an error bar, the fields low and high are the error bar's ends. x: the title of the axis
    along which the bars extend."""
    parts = distinct(values, "part")
    names = min(NAMES, LETTER * max(map(len, distinct(values, "bar"))) + 10)
    return {
        "$schema": SCHEMA,
        "title": title,
        "data": {"values": [{**value, "order": parts.index(value["part"])} for value in values]},
        "facet": facet(distinct(values, "panel"), WIDTH),
        "columns": 1,
        "spacing": 14,
        "resolve": {"scale": {"y": "independent"}},
        "spec": {"width": WIDTH - names, "height": {"step": ROW}, "layer": _layers(parts, x)},
    }


def _layers(parts: Sequence[str], x: str) -> list[Spec]:
    y = {"field": "bar", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": NAMES, "ticks": False}}
    length = axis("length", x, scale={"zero": True, "nice": False}, axis={"tickCount": 5})
    tips = tooltip("bar", "part", "length", "low", "high")
    bar = {"y": y, "x": length, "color": _colour(parts), "order": {"field": "order", "type": "quantitative"}}
    whisker = {"y": y, "x": axis("low", x), "x2": {"field": "high"}}
    return [
        {"mark": "bar", "encoding": bar | {"tooltip": tips}},
        known("low", {"transform": [], "mark": {"type": "rule", "strokeWidth": 2}, "encoding": whisker}),
    ]


def _colour(parts: Sequence[str]) -> Spec:
    """Return the Vega-Lite encoding of the colours of `parts`. No part gets the first colour of the palette, which
    belongs to the full cache."""
    legend = {"title": None, "columns": across(parts), "values": list(parts)} if len(parts) > 1 else None
    scale = {"domain": ["", *parts], "range": "category"}
    return {"field": "part", "type": "nominal", "scale": scale, "legend": legend}
