"""Horizontal bars in panels, stacked from parts, with error bars where a bar has one part."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.plots.curves import axis, tooltip
from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import LETTER, SCHEMA, WIDTH, across

ROW = 18  # height of a bar
NAMES = 220  # most width of the names of bars


def bars(title: str, values: Sequence[Point], *, x: str) -> Spec:
    """The figure. Values have the fields panel, bar, part, length, and low and high where there are error bars."""
    panels, parts = distinct(values, "panel"), distinct(values, "part")
    names = min(NAMES, LETTER * max(map(len, distinct(values, "bar"))) + 10)
    legend = {"title": None, "columns": across(parts)} if len(parts) > 1 else None
    colour = {
        "field": "part",
        "type": "nominal",
        "scale": {"domain": ["", *parts], "range": "category"},
        "legend": legend and legend | {"values": parts},
    }
    place = {
        "y": {
            "field": "bar",
            "type": "nominal",
            "title": None,
            "sort": None,
            "axis": {"labelLimit": NAMES, "ticks": False},
        },
        "x": axis("length", x, scale={"zero": True, "nice": False}, axis={"tickCount": 5, "format": ",~r"}),
    }
    order = {"field": "order", "type": "quantitative"}
    tips = tooltip("bar", "part", "length", "low", "high")
    whisker = {"y": place["y"], "x": axis("low", x), "x2": {"field": "high"}}
    layers: list[Spec] = [{"mark": "bar", "encoding": {**place, "color": colour, "order": order, "tooltip": tips}}]
    if any("low" in value for value in values):
        layers.append({"mark": {"type": "rule", "style": "whisker"}, "encoding": whisker})
    return {
        "$schema": SCHEMA,
        "title": title,
        "data": {"values": [{**value, "order": parts.index(value["part"])} for value in values]},
        "facet": {"field": "panel", "type": "nominal", "title": None, "sort": panels},
        "columns": 1,
        "spacing": 14,
        "resolve": {"scale": {"y": "independent"}},
        "spec": {"width": WIDTH - names, "height": {"step": ROW}, "layer": layers},
    }
