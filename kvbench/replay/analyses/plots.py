"""Makes the figures of analyses: panels of lines, bars or squares, in the style of a report's figures.

An error bar or band extends 1.96 standard errors to each side, which is about a 95% interval; the caption says so.
`tally` estimates the standard errors by a jackknife over questions. A result without a standard error has no error bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.replay.analyses.api import Row
from kvbench.report.plots import style
from kvbench.report.plots.bars import bars as draw_bars
from kvbench.report.plots.curves import axis, curves
from kvbench.report.plots.figure import Figure, distinct
from kvbench.report.plots.heat import heat as draw_heat

ERROR = 1.96  # length of an error bar to each side, in standard errors
BARS = "Bars and bands: 1.96 standard errors to each side (jackknife over questions); none if there is one question."
NONE = "No error bars: the table has the standard errors."
Heat = Mapping[str, Mapping[str, Mapping[str, float | None]]]  # by panel, row and column, a share from 0 to 1


def with_error(row: Row, figure: str) -> dict[str, float]:
    """Return the value in the column `figure` of a row of results as a dictionary for a plot; {} if there is no value.
    `y` is the value. If its standard error is known, `low` and `high` are the ends of its error bar."""
    value, error = row[figure], row.get(f"{figure}_se")
    if value is None:
        return {}
    return {"y": value} if error is None else {"y": value, "low": value - ERROR * error, "high": value + ERROR * error}


def lines(
    name: str, title: str, points: Sequence[dict[str, Any]], *, x: str, y: str, about: str = "", log: bool = False
) -> list[Figure]:
    """Return a list with one figure, lines through points; [] if no point has y.

    points: dictionaries with panel, line, x, y, low and high; points without y are left out. about: the first part of
    the caption. log: whether the x axis is logarithmic, to base 2, with a mark at each x.
    """
    known = [point for point in points if "y" in point]
    if not known:
        return []
    names = distinct(known, "line")
    values = [{**p, "kind": "cell", "method": p["line"], "dash": style.dash(p["line"], names)} for p in known]
    spec = curves(
        title,
        values,
        x=_across(x, sorted({point["x"] for point in known}), log),
        y=axis("y", y, scale={"zero": True, "nice": 5}, axis={"tickCount": 5}),
        looks=style.methods(names, names),
        low="low",
        high="high",
        hints=("method", "x"),
    )
    return [Figure(name, title, f"{about} {BARS}".strip(), spec)]


def _across(title: str, places: Sequence[float], log: bool) -> dict[str, Any]:
    """Return the x axis of a figure of lines. log: whether the axis is logarithmic. places: the x values of the points.
    A logarithmic axis has a mark at each of them, a linear axis at round numbers."""
    lines: dict[str, Any] = {"grid": False, "format": ",~r"}
    if log:
        scale = {"type": "log", "base": 2, "nice": False, "padding": 8}
        return axis("x", title, scale=scale, axis=lines | {"values": list(places)})
    whole = all(place == int(place) for place in places)
    return axis("x", title, axis=lines | ({"tickMinStep": 1} if whole else {}))


def bars(name: str, title: str, points: Sequence[dict[str, Any]], *, x: str, about: str = "") -> list[Figure]:
    """Return a list with one figure, stacked bars; [] if no point has y.

    points: dictionaries with panel, bar, part and y, the length of this part of the bar. A bar with one part may also
    have low and high, the ends of its error bar. about: the first part of the caption.
    """
    values = [{"length": p["y"], **{k: v for k, v in p.items() if k != "y"}} for p in points if "y" in p]
    if not values:
        return []
    caption = BARS if any("low" in value for value in values) else NONE
    return [Figure(name, title, f"{about} {caption}".strip(), draw_bars(title, values, x=x))]


def heat(name: str, title: str, panels: Heat, *, x: str, value: str, about: str = "") -> list[Figure]:
    """Return a list with one figure, heat maps of shares from 0 to 1; [] if every share is None. A square whose share
    is None stays empty."""
    squares: list[dict[str, Any]] = [
        {"panel": panel, "row": row, "column": column, "share": share}
        for panel, rows in panels.items()
        for row, columns in rows.items()
        for column, share in columns.items()
    ]
    known = [square for square in squares if square["share"] is not None]
    if not known:
        return []
    rows: list[str] = distinct(squares, "row")
    columns: list[str] = distinct(squares, "column")
    return [Figure(name, title, f"{about} {NONE}".strip(), draw_heat(title, known, rows, columns, x=x, value=value))]
