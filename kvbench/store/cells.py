"""Counts the rows of each cell of a run, and compares the counts with the cells that the run's record plans.

    unfinished_cells(environment, table)        # by hash: UnfinishedCell("walk gkv @48", {"ok": 3}, planned=16)

The record (`environment` in run.json) states the name, the number of rows and the hash of every planned cell in
`plans`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import counted
from kvbench.store.identity import digest
from kvbench.store.schema import FINAL, OK

if TYPE_CHECKING:
    import pyarrow as pa

CELL = ("task", "method", "options", "budget", "budget_share", "interval")  # the columns that tell a run's cells apart
SAVED = (OK, "unscored")  # statuses of rows with an answer, which no attempt replaces

Statuses = Counter[str]  # number of rows by status


@dataclass(frozen=True, slots=True)
class UnfinishedCell:
    """A planned cell that lacks rows. `name`: as messages name it, "walk gkv @48". `statuses`: its rows."""

    name: str
    statuses: Statuses
    planned: int

    @property
    def progress(self) -> str:
        """The saved rows as text, as in "3 of 16 rows"."""
        return f"{sum(self.statuses[status] for status in SAVED)} of {counted(self.planned, 'row')}"


def cell_hash(row: Mapping[str, Any]) -> str:
    """Return a short hash that all rows of a cell share, and no row of the run's other cells has. row: the columns in
    CELL as rows store them. Rows whose budget is the same share of the prompt belong to one cell, although their
    budgets in entries differ."""
    return digest([row[name] for name in CELL if name != "budget" or row["budget_share"] is None])[:16]


def counts(table: pa.Table) -> dict[str, tuple[str, Statuses]]:
    """Return by `cell_hash` the task and the number of rows by status of every cell that has rows."""
    import pyarrow.compute as pc

    columns = [*CELL, "status"]
    named = table.select(columns).unify_dictionaries()
    sizes = pc.if_else(pc.is_valid(named["budget_share"]), None, named["budget"])
    parts = named.set_column(CELL.index("budget"), "budget", sizes).group_by(columns).aggregate([([], "count_all")])
    cells: dict[str, tuple[str, Statuses]] = {}
    for part in parts.to_pylist():
        cells.setdefault(cell_hash(part), (part["task"], Counter()))[1][part["status"]] += part["count_all"]
    return cells


def unfinished_cells(environment: Mapping[str, Any], table: pa.Table) -> dict[str, UnfinishedCell] | None:
    """Return the planned cells that lack rows, by `cell_hash`; None if `rows_of_cells` is None.

    environment: the part of the run's record. table: the run's rows, with the columns in CELL.
    """
    if (plans := rows_of_cells(environment)) is None:
        return None
    cells, lacking = counts(table), {}
    for plan in plans:
        name = plan.get("hash", "")  # a cell without questions has none
        _, statuses = cells.get(name, ("", Counter()))
        if sum(statuses[status] for status in (*SAVED, *FINAL)) < plan["rows"]:
            lacking[name] = UnfinishedCell(plan["cell"], statuses, plan["rows"])
    return lacking


def rows_of_cells(environment: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return what a run's record states about its cells, if it states the rows of each; None if it does not, or if the
    run is a shard, whose cells have fewer rows than the record states."""
    plans = environment.get("plans") or []
    return plans if plans and "shard" not in environment and all("rows" in plan for plan in plans) else None
