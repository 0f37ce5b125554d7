"""Heat maps: panels of squares whose shade stands for a share from 0 to 1, with the number written in each square."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.plots.curves import facet, tooltip
from kvbench.report.plots.figure import Point, Spec, distinct
from kvbench.report.plots.style import LETTER, NAMES, SCHEMA, WIDTH

GAP = 14
ROW = 17  # height of a square
NARROW, BROAD = 22, 48  # smallest and largest width of a square; a number fits into the smallest
DARK = 0.6  # shares from here to 1 have a dark shade in the light theme
LEGEND = {"orient": "bottom", "direction": "horizontal", "gradientLength": 160, "tickCount": 5}
HINTS = ("panel", "row", "column", "share", "questions")


def heat(
    title: str,
    squares: Sequence[Point],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x: str | None,
    value: str = "score",
) -> Spec:
    """Return the figure's Vega-Lite specification. Squares have the fields panel, row, column and share. rows: the
    names of the rows, from the top. columns: the names of the columns, from the left. x: the title of the axis of
    columns. value: what the share is, as the legend names it."""
    panels = distinct(squares, "panel")
    across, side = _sizes(len(panels), rows, len(columns))
    inner = {
        "width": side * len(columns),
        "height": ROW * len(rows),
        "layer": _layers(value, [field for field in HINTS if field in squares[0]]),
        "encoding": _place(rows, columns, x, side),
    }
    values = [{**square, "dark": square["share"] >= DARK} for square in squares]
    spec: Spec = {"$schema": SCHEMA, "title": title, "data": {"values": values}}
    if panels == [""]:
        return spec | inner
    facets = {"facet": facet(panels, side * len(columns)), "columns": across}
    return spec | facets | {"spacing": {"row": 10, "column": GAP}, "spec": inner}


def _sizes(panels: int, rows: Sequence[str], columns: int) -> tuple[int, float]:
    """Return how many panels stand side by side, and the width of a square in pixels. panels, columns: their numbers.
    rows: the names of the rows."""
    room = WIDTH - min(NAMES, LETTER * max(map(len, rows)) + 10)
    across = 2 if panels > 1 and (room - GAP) / 2 >= NARROW * columns else 1
    return across, max(NARROW, min(BROAD, (room - GAP * (across - 1)) / across / columns))


def _layers(value: str, hints: Sequence[str]) -> list[Spec]:
    """Return the layers: the squares, and the numbers in them. A number is dark on a light shade and light on a dark
    shade. value: see `heat`. hints: the fields of the tooltip."""
    shade = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": "heatmap"}, "title": value}
    number = {"text": {"field": "share", "type": "quantitative", "format": ".2f"}}
    squares: Spec = {"mark": "rect", "encoding": {"color": {**shade, "legend": LEGEND}, "tooltip": tooltip(*hints)}}
    numbers: list[Spec] = [
        {
            "transform": [{"filter": {"field": "dark", "equal": dark}}],
            "mark": {"type": "text", "fontSize": 9, "style": look},
            "encoding": number,
        }
        for dark, look in ((False, "on-light"), (True, "on-dark"))
    ]
    return [squares, *numbers]


def _place(rows: Sequence[str], columns: Sequence[str], x: str | None, side: float) -> Spec:
    """Return the encoding of both axes. The labels of all columns are vertical if the longest is wider than a
    square. side: the width of a square."""
    upright = LETTER * max(map(len, columns)) > side
    label: Spec = {"ticks": False, "labelLimit": NAMES}
    return {
        "x": _axis("column", columns, x, label | {"labelAngle": -90 if upright else 0, "orient": "bottom"}),
        "y": _axis("row", rows, None, label),
    }


def _axis(field: str, names: Sequence[str], title: str | None, axis: Spec) -> Spec:
    order = list(names)
    scale = {"domain": order, "padding": 0.04}
    return {"field": field, "type": "nominal", "title": title, "sort": order, "scale": scale, "axis": axis}
