"""What figures with panels have in common: a facet for each value of the field `panel`, in one column or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.plots.figure import Spec
from kvbench.report.plots.points import distinct
from kvbench.report.plots.style import SCHEMA, WIDTH

ONE_COLUMN = 3  # panels that stand below each other; more stand side by side
HEIGHT, LOW = 190, 150  # of a panel in one column, in two
AXIS = 44  # left of a panel
GAP = 18


def facets(title: str, values: Sequence[Any], layers: Sequence[Spec], *, together: bool = True) -> Spec:
    """A figure with panels in the order of the values. together: they share the axis of y, as they share that of x."""
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
