"""Panels of squares whose shade stands for a share from 0 to 1, with the share written in."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import LETTER, SCHEMA, WIDTH

GAP = 14
ROW = 17  # height of a square
NARROW, BROAD = 22, 48  # width of a square: a number fits, the most
DARK = 0.6  # from this share on, the shade is dark in a light theme


def heat(
    title: str,
    squares: Sequence[Point],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x: str | None,
    value: str = "score",
) -> Spec:
    """Squares with the fields panel, row, column and share; rows from the top. value: what the share is of."""
    panels = distinct(squares, "panel")
    names = LETTER * max(map(len, rows)) + 10
    side = WIDTH - names
    across = 2 if len(panels) > 1 and (side - GAP) / 2 >= NARROW * len(columns) else 1
    width = max(NARROW, min(BROAD, (side - GAP * (across - 1)) / across / len(columns)))
    place = {
        "x": {"field": "column", "type": "nominal", "title": x, "sort": list(columns), "axis": _axis(columns, width)},
        "y": {"field": "row", "type": "nominal", "title": None, "sort": list(rows), "axis": {"ticks": False}},
    }
    for axis in place.values():
        axis["scale"] = {"domain": axis["sort"], "padding": 0.04}
    shade = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": "heatmap"}, "title": value}
    number = {"field": "share", "type": "quantitative", "format": ".2f"}
    hints = [
        {"field": f, "type": "nominal"} for f in ("panel", "row", "column", "share", "questions") if f in squares[0]
    ]
    layers: list[Spec] = [{"mark": "rect", "encoding": {"color": {**shade, "legend": _LEGEND}, "tooltip": hints}}]
    for dark, look in ((False, "on-light"), (True, "on-dark")):
        text = {"type": "text", "fontSize": 9, "style": look}
        where = {"filter": {"field": "dark", "equal": dark}}
        layers.append({"transform": [where], "mark": text, "encoding": {"text": number}})
    values = [{**square, "dark": square["share"] >= DARK} for square in squares]
    inner = {"width": width * len(columns), "height": ROW * len(rows), "layer": layers, "encoding": place}
    spec: Spec = {"$schema": SCHEMA, "title": title, "data": {"values": values}}
    if panels == [""]:
        return spec | inner
    facet = {"field": "panel", "type": "nominal", "title": None, "sort": panels}
    return spec | {"facet": facet, "columns": across, "spacing": {"row": 10, "column": GAP}, "spec": inner}


_LEGEND = {"orient": "bottom", "direction": "horizontal", "gradientLength": 160, "tickCount": 5}


def _axis(columns: Sequence[str], width: float) -> Spec:
    """Labels stand upright where they do not fit side by side."""
    upright = LETTER * max(map(len, columns)) > width
    return {"ticks": False, "labelAngle": -90 if upright else 0, "orient": "bottom"}
