"""Divides the work of a run into jobs. On devices of one kind, with the same slots per cell, the rows do not depend on
how the work is divided, except for their times (docs/clusters.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.runner.cell import CellPlan
    from kvbench.runner.workload import PlannedRow

ROUNDS = 4  # rows per slot in a job; the slots that run empty at its end cost the time of about half a row per slot


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of one cell that one worker generates. cell: the cell's index in the run's plan. keys: the rows' keys."""

    cell: int
    keys: tuple[str, ...]

    def without(self, done: Collection[str]) -> Job:
        """Return the job without the rows in `done`, which are saved already."""
        return Job(self.cell, tuple(key for key in self.keys if key not in done))


def jobs_of(cells: Sequence[CellPlan], done: Collection[str], *, whole: bool) -> list[Job]:
    """Return the jobs of a run, in the order of its cells. done: keys of saved rows, which the jobs leave out. whole:
    make one job per cell. Otherwise a cell is cut between questions into jobs of about `ROUNDS` rows per slot."""
    jobs = []
    for index, cell in enumerate(cells):
        blocks = [cell.rows] if whole else _blocks(cell.rows, ROUNDS * cell.plan.slots)
        jobs += [Job(index, tuple(row.key for row in block)) for block in blocks]
    return [left for job in jobs if (left := job.without(done)).keys]


def _blocks(rows: Iterable[PlannedRow], least: int) -> list[list[PlannedRow]]:
    """Divide rows into blocks of whole questions. Every block but the last has at least `least` rows."""
    blocks: list[list[PlannedRow]] = [[]]
    for _, samples in groupby(rows, key=lambda row: row.prompt.doc_id):
        if len(blocks[-1]) >= least:
            blocks.append([])
        blocks[-1] += samples
    return blocks
