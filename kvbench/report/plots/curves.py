"""Lines with bands in panels. The field `method` decides the colour of a line and the shape of its points; the field
`dash` decides the line's pattern.

    curves("Loss", values, x=axis("x", "step"), y=axis("loss", "loss"), looks=style.methods(names, names))

Values have the fields panel, method, dash, kind, and the fields of `x` and `y`. The field `kind` is "rule" for a
horizontal line, otherwise "cell".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import LETTER, SCHEMA, WIDTH

ONE_COLUMN = 3  # up to this many panels stand in one column; more stand in two
HEIGHT, LOW = 190, 150  # height of a panel in one column, and in two columns
AXIS = 44  # room for the y axis, left of a panel
GAP = 18
SYMBOL = {"type": "point", "filled": True, "size": 45, "opacity": 1}
CLOSE = 40  # from this mean number of points per line on, lines have no symbols


def axis(field: str, title: str | None, **more: Any) -> Spec:
    """Return the encoding of a numeric field, with its title. `field` is a name from the code, never a user's text."""
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
    """Return the figure's Vega-Lite specification. looks: the encodings of colour, shape and dashes, from
    `style.methods`. low, high: the fields with the ends of the bands. hints: further fields of the tooltip. together:
    whether all panels share one y axis."""
    line = {"y": y, "color": looks["color"]}
    tips = tooltip(*hints, y["field"], low, high)
    layers = [
        *(_bands(x, line, low, high) if low else []),
        where("rule", {"type": "rule", "strokeWidth": 1.5}, **line, tooltip=tips),
        where("cell", {"type": "line"}, x=x, **line, strokeDash=looks["strokeDash"]),
    ]
    if len(values) < CLOSE * len(distinct(values, "panel")) * len(distinct(values, "method")):
        layers.append(where("cell", SYMBOL, x=x, **line, shape=looks["shape"], tooltip=tips))
    return facets(title, values, layers, together=together)


def _bands(x: Spec, line: Spec, low: str, high: str) -> list[Spec]:
    """Return the layers that show the range from the field `low` to the field `high`: bands around horizontal lines and
    curves, and a bar at each point."""
    band = {**line, "y": {**line["y"], "field": low}, "y2": {"field": high}}
    layers = [
        where("rule", {"type": "rect", "opacity": 0.08}, **band),
        where("cell", {"type": "area", "fillOpacity": 0.1}, x=x, **band),
        where("cell", {"type": "rule", "opacity": 0.6}, x=x, **band),
    ]
    return [known(low, layer) for layer in layers]


def facets(title: str, values: Sequence[Point], layers: Sequence[Spec], *, together: bool = True) -> Spec:
    """Return a figure with a panel for each value of the field `panel`, in order. together: whether all panels share
    one y axis."""
    panels = distinct(values, "panel")
    across = 1 if len(panels) <= ONE_COLUMN else 2
    axes = 1 if together else across
    width = (WIDTH - AXIS * axes - GAP * (across - 1)) // across
    short = _shortened(panels, int(width / LETTER))
    return {
        "$schema": SCHEMA,
        "title": title,
        "data": {"values": [value | {"panel": short[value["panel"]]} for value in values]},
        "facet": facet(list(short.values()), width),
        "columns": across,
        **({} if together else {"resolve": {"scale": {"y": "independent"}}}),
        "spacing": {"row": 14, "column": GAP},
        "spec": {"width": width, "height": HEIGHT if across == 1 else LOW, "layer": list(layers)},
    }


def _shortened(panels: Sequence[str], most: int) -> dict[str, str]:
    """Return a short title for each panel: titles longer than `most` letters are cut in the middle. No title is cut if
    two titles would become equal."""
    tail = most * 2 // 3
    short = {p: p if len(p) <= most else f"{p[: most - tail - 1]}…{p[-tail:]}" for p in panels}
    return short if len(set(short.values())) == len(panels) else {p: p for p in panels}


def facet(panels: Sequence[str], width: float) -> Spec:
    """Return the encoding that makes a panel of each value of the field `panel`, in order. Titles are cut to `width`,
    the width of a panel."""
    return {"field": "panel", "type": "nominal", "title": None, "sort": list(panels), "header": {"labelLimit": width}}


def where(kind: str, mark: Spec, **encoding: Any) -> Spec:
    """Return a layer that draws only the values with this `kind`."""
    return {"transform": [{"filter": {"field": "kind", "equal": kind}}], "mark": mark, "encoding": encoding}


def known(field: str, layer: Spec) -> Spec:
    """Return the layer without the values that lack a field. Vega-Lite would draw such values at 0."""
    return {**layer, "transform": [*layer["transform"], {"filter": {"field": field, "valid": True}}]}


def tooltip(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal"} for field in fields if field]
