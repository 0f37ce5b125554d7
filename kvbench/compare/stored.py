"""Finds stored answers with their texts in the runs of one side. A run's folder is read only when one of the run's
answers is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.compare.cell import Cell, Side
from kvbench.report.cells import method_label
from kvbench.store import read_rows, read_texts


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored answers of one side, as in stored.answer(cell, "q3", 0)["output"]. A side without run folders, such as
    a baseline file, has no stored answers."""

    side: Side
    _read: dict[str, Any] = field(default_factory=dict)

    def answer(self, cell: Cell, question: str, sample: int) -> Mapping[str, Any] | None:
        """Return the row of a sample, with its texts; None if no run folder of this side has the sample."""
        for folder in self.side.folders:
            if folder.name not in cell.run.split(", "):
                continue
            if folder.name not in self._read:
                rows = read_rows(folder).merge(read_texts(folder), on="row_key", how="left")
                self._read[folder.name] = rows.set_index(["task", "doc_id", "sample"]).sort_index()
            rows = self._read[folder.name]
            try:
                there = rows.loc[[(cell.key.task, question, sample)]].to_dict("records")
            except KeyError:
                continue
            for row in there:
                if _is_of(cell, row):
                    return row
        return None

    def output(self, cell: Cell, question: str, sample: int) -> str | None:
        text = (self.answer(cell, question, sample) or {}).get("output")
        return text if isinstance(text, str) else None


def _is_of(cell: Cell, row: Mapping[str, Any]) -> bool:
    """Return whether a row belongs to this cell. A row without a budget (or interval) fits a cell whose budget (or
    interval) is None."""
    key = cell.key
    share, size, interval = (_number(row[name]) for name in ("budget_share", "budget", "interval"))
    budget = size if share is None else share
    if (row["model"], row["seed"], interval, budget) != (key.model, key.seed, key.interval, key.budget):
        return False
    return method_label(row["method"], row["options"], {}) == key.method


def _number(value: Any) -> Any:
    return None if not isinstance(value, (int, float)) or value != value else value
