"""Lines with bands in panels, a colour and a shape for each value of the field `method`.

    curves("Loss", values, x=axis("x", "step"), y=axis("loss", "loss"), looks=style.methods(names, names))

Values have the fields panel, method, dash, `x` and that of y, and `kind`: "cell", or "rule" for a horizontal line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import SCHEMA, WIDTH

ONE_COLUMN = 3  # panels that stand below each other; more stand side by side
HEIGHT, LOW = 190, 150  # of a panel in one column, in two
AXIS = 44  # left of a panel
GAP = 18
CLOSE = 40  # from so many points of a line on, they have no symbols


def axis(field: str, title: str, **more: Any) -> Spec:
    """A channel for a number, with its title; names of fields are ours, never a user's."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def curves(
    title: str,
    values: Sequence[Point],
    *,
    x: Spec,
    y: Spec,
    looks: Spec,
    low: str = "",
    high: str = "",
    hints: Sequence[str] = (),
    together: bool = True,
) -> Spec:
    """The figure. low, high: fields of the bands; hints: of the tooltip; together: panels share the axis of y."""
    line = {"y": y, "color": looks["color"]}
    band = {"y": {**y, "field": low}, "y2": {"field": high}, "color": looks["color"]}
    tips = tooltip(*hints, y["field"], low, high)
    symbol = {"type": "point", "filled": True, "size": 45, "opacity": 1}
    layers = []
    if low:
        layers = [
            where("rule", {"type": "rect", "opacity": 0.08}, **band),
            where("cell", {"type": "area", "fillOpacity": 0.1}, x=x, **band),
            where("cell", {"type": "rule", "opacity": 0.6}, x=x, **band),
        ]
    layers += [
        where("rule", {"type": "rule", "strokeWidth": 1.5}, **line, tooltip=tips),
        where("cell", {"type": "line"}, x=x, **line, strokeDash=looks["strokeDash"]),
    ]
    if max(sum(p["panel"] == panel for p in values) for panel in distinct(values, "panel")) < CLOSE * len(
        distinct(values, "method")
    ):
        layers.append(where("cell", symbol, x=x, **line, shape=looks["shape"], tooltip=tips))
    return facets(title, values, layers, together=together)


def facets(title: str, values: Sequence[Point], layers: Sequence[Spec], *, together: bool = True) -> Spec:
    """A figure with a panel for each value of `panel`, in order. together: they share the axis of y, as that of x."""
    panels = distinct(values, "panel")
    across = 1 if len(panels) <= ONE_COLUMN else 2
    axes = 1 if together else across
    width = (WIDTH - AXIS * axes - GAP * (across - 1)) // across
    return {
        "$schema": SCHEMA,
        "title": title,
        "data": {"values": list(values)},
        "facet": {"field": "panel", "type": "nominal", "title": None, "sort": panels},
        "columns": across,
        **({} if together else {"resolve": {"scale": {"y": "independent"}}}),
        "spacing": {"row": 14, "column": GAP},
        "spec": {"width": width, "height": HEIGHT if across == 1 else LOW, "layer": list(layers)},
    }


def where(kind: str, mark: Spec, **encoding: Any) -> Spec:
    """A layer of the values of one kind."""
    return {"transform": [{"filter": {"field": "kind", "equal": kind}}], "mark": mark, "encoding": encoding}


def tooltip(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal"} for field in fields if field]
