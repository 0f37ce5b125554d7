"""Splits a figure with many panels into parts that each fit a page of print, with the same axes and colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvbench.report.plots.figure import Figure

TALL = 960  # largest height of all panels of one part, in CSS pixels
HEAD = 38  # title of a panel, and the space below it


def pages(figure: Figure) -> Iterator[Figure]:
    """Yield the figure itself if it fits a page. Otherwise yield its parts NAME-1, NAME-2 and so on, with the panels in
    order."""
    facet = figure.spec.get("facet")
    panels = facet["sort"] if facet else []
    across = figure.spec.get("columns", 1)
    most = across * max(1, TALL // (figure.spec["spec"]["height"] + HEAD)) if facet else 0
    if len(panels) <= most or not facet:
        yield figure
        return
    parts = [panels[start : start + most] for start in range(0, len(panels), most)]
    for number, part in enumerate(parts, 1):
        inside = [value for value in figure.spec["data"]["values"] if value["panel"] in set(part)]
        title = f"{figure.title}, part {number} of {len(parts)}"
        spec = figure.spec | {"title": title, "data": {"values": inside}, "facet": facet | {"sort": part}}
        yield replace(figure, name=f"{figure.name}-{number}", title=title, spec=spec)
