"""The figure of `kvbench train --plot`: one panel for the loss and one for each other figure of the recipe, over the
steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.report.plots import Figure, style
from kvbench.report.plots.curves import axis, curves

MOST = 400  # points of a line; a longer log is shown as means over equally many steps
APART = ("step", "lr", "grad_norm")  # columns of the log that have no panel
ABOUT = "The training log: each figure is measured on the batch of its step. No error bars, no held-out figures."
MEANS = "A point is the mean over {steps} steps; the band spans their smallest and largest values."


def log_figure(log: Path, recipe: str) -> Figure:
    """Return the figure of a training; the file `log` has a line per step."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = -(-len(rows) // MOST)
    names = [name for name in rows[0] if name not in APART]
    bins = [rows[start : start + steps] for start in range(0, len(rows), steps)]
    values = [_point(name, part) for name in names for part in bins]
    looks = {channel: look | {"legend": None} for channel, look in style.methods(names, names).items()}
    spec = curves(
        title := f"Training of {recipe}",
        values,
        x=axis("step", "step", scale={"zero": False, "nice": False}, axis={"grid": False, "tickMinStep": 1}),
        y=axis("value", None, scale={"zero": False, "nice": 5}, axis={"tickCount": 5}),
        looks=looks,
        low="least" if steps > 1 else "",
        high="most" if steps > 1 else "",
        hints=("step",),
        together=False,
    )
    return Figure("training", title, ABOUT + (" " + MEANS.format(steps=steps) if steps > 1 else ""), spec)


def _point(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = [row[name] for row in rows]
    return {
        "kind": "cell",
        "panel": name,
        "method": name,
        "dash": 0,
        "step": rows[-1]["step"],
        "value": sum(numbers) / len(numbers),
        "least": min(numbers),
        "most": max(numbers),
    }
