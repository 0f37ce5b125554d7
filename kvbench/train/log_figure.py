"""Makes the plot of `kvbench train --plot`: loss and other quantities of each step's batch, and of held-out data.

Each quantity has a panel of its own, which shows the quantity's values over the steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.report.plots import Figure, style
from kvbench.report.plots.curves import axis, curves

MOST = 400  # most points of a line; of a longer log, each point is the mean over several steps
APART = ("step", "lr", "grad_norm")  # columns of the log that have no panel
ABOUT = "The training log: each figure is that of a step's own batch; held-out ones are of data that training never "
ABOUT += "sees. No error bars."
MEANS = "A point is the mean over {steps} steps; the band spans their smallest and largest values."
HELD_OUT = "held-out "  # begins the names of panels


def log_figure(log: Path, held_out: Path, recipe: str) -> Figure:
    """Return the plot of a training. log: path of the log, which has a line per step. held_out: path of the file with
    the held-out figures, which has a line each time they were computed."""
    rows, tested = _rows(log), _rows(held_out)
    steps = -(-len(rows) // MOST)
    bins = [rows[start : start + steps] for start in range(0, len(rows), steps)]
    values = [_point(name, name, part) for name in _names(rows) for part in bins]
    values += [_point(HELD_OUT + name, name, [row]) for name in _names(tested) for row in tested]
    panels = list(dict.fromkeys(value["panel"] for value in values))
    looks = {channel: look | {"legend": None} for channel, look in style.methods(panels, panels).items()}
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


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in rows[0] if name not in APART]


def _point(panel: str, name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = [row[name] for row in rows]
    return {
        "kind": "cell",
        "panel": panel,
        "method": panel,
        "dash": 0,
        "step": rows[-1]["step"],
        "value": sum(numbers) / len(numbers),
        "least": min(numbers),
        "most": max(numbers),
    }
