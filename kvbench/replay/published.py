"""Compares figures of a replay with losses and cosines that papers print (`kvbench.sources.published`).

A printed number is compared with the row of results of the same model, task, method and budget. If the paper states an
interval, the row must have this interval. The papers do not say which questions they used; `TASKS` maps the names of
their tasks to the tasks of kvbench that are used instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.report.published import label_of, plain, without_weights
from kvbench.sources.published import Published, published

# Metric in a paper -> column of a replay. Table 1 of ForesightKV prints the loss that eviction adds, in percent of the
# full cache's loss on the same tokens; `Printed.value` converts it to a ratio.
FIGURES = {
    "loss ratio vs full cache": "loss_ratio",
    "loss increase of low-entropy tokens": "loss_ratio_low",
    "loss increase of high-entropy tokens": "loss_ratio_high",
    "cosine similarity of attention outputs before/after eviction": "cosine",
}
TASKS = {
    "math": "math500",
    "code": "livecodebench",
    "summarization": "longbench/gov_report",
    "LM loss on sampled reasoning traces": "aime24",
    "reasoning traces": "aime24",
}
MODELS = {"not stated (Qwen3-4B presumed)": "Qwen3-4B"}
INTERVAL = re.compile(r"L=(\d+)")


@dataclass(frozen=True, slots=True)
class Printed:
    """A number that a paper prints, and the column of a replay (`figure`) with which it is compared.

    interval: None if the paper states no interval.
    """

    row: Published
    figure: str  # the column of the replay
    method: str
    interval: int | None

    @property
    def value(self) -> float:
        value = float(self.row.value)
        return 1 + value / 100 if self.row.unit == "%" else value

    def fits(self, model: str, row: Mapping[str, Any]) -> bool:
        """Return whether the number is to be compared with this row of a replay with this model."""
        theirs = MODELS.get(self.row.model, self.row.model), TASKS[self.row.task], self.method, self.row.entries
        ours = model.rsplit("/", 1)[-1], row["task"], without_weights(row["method"]), row["budget"]
        same = plain(theirs[0]) == plain(ours[0]) and theirs[1:] == ours[1:]
        return same and self.interval in (None, row["interval"])


def beside(model: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a dictionary for each pair of a row and a printed number that fits it. It has the replay's figure, the
    figure's standard error, and the paper's number."""
    return [_line(row, printed) for row in rows for printed in every() if printed.fits(model, row)]


@functools.cache
def every() -> tuple[Printed, ...]:
    """Return all numbers in papers with which a figure of a replay can be compared."""
    rows = (row for row in published() if row.metric in FIGURES)
    found = ((row, label_of(row.method.lower(), str(row.entries))) for row in rows)
    return tuple(Printed(row, FIGURES[row.metric], method, _interval(row)) for row, method in found if method)


def _interval(row: Published) -> int | None:
    found = INTERVAL.search(row.budget)
    return int(found[1]) if found else None


def _line(row: Mapping[str, Any], printed: Printed) -> dict[str, Any]:
    here = row[printed.figure]
    return {
        **{name: row[name] for name in ("task", "method", "budget", "interval")},
        "figure": printed.figure,
        "here": here,
        "here_se": row[f"{printed.figure}_se"],
        "published": printed.value,
        "difference": None if here is None else here - printed.value,
        "published_method": printed.row.method,
        "published_task": printed.row.task,
        "source": f"{printed.row.paper}, {printed.row.table_or_figure}",
        "notes": printed.row.notes,
    }
