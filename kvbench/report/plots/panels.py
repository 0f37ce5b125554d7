"""What figures with panels have in common: a facet per task, in one column or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.report.plots.figure import Spec
from kvbench.report.plots.style import SCHEMA, WIDTH

ONE_COLUMN = 3  # panels that stand below each other; more stand side by side
HEIGHT, LOW = 190, 150  # of a panel in one column, in two
AXIS = 44  # left of a panel
GAP = 18


def columns(panels: Sequence[str]) -> int:
    return 1 if len(panels) <= ONE_COLUMN else 2


def facets(title: str, values: Sequence[Any], panels: Sequence[str], layers: Sequence[Spec], **encoding: Any) -> Spec:
    """A figure with a panel for every value of the field `panel`, and shared axes."""
    across = columns(panels)
    width = WIDTH - AXIS if across == 1 else (WIDTH - 2 * AXIS - GAP) // 2
    inner: Spec = {
        "width": width,
        "height": HEIGHT if across == 1 else LOW,
        "layer": list(layers),
        "encoding": encoding,
    }
    return {
        "$schema": SCHEMA,
        "title": title,
        "data": {"values": list(values)},
        "facet": {"field": "panel", "type": "nominal", "title": None, "sort": list(panels)},
        "columns": across,
        "spacing": {"row": 14, "column": GAP},
        "spec": inner,
    }


def where(kind: str, mark: Spec, **encoding: Any) -> Spec:
    """A layer of the values of one kind."""
    return {"transform": [{"filter": {"field": "kind", "equal": kind}}], "mark": mark, "encoding": encoding}


def tooltip(*fields: str) -> list[Spec]:
    return [{"field": field, "type": "nominal"} for field in fields]
