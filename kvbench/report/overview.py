"""The first page of a report of scores: a table of methods by tasks, the best methods at each budget, and the methods
with the highest scores for their bytes.

    for block in overview(tables): ...

The overview computes no figures of its own: it shows figures of the tables (`kvbench.report.tables`) side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.console.progress import size
from kvbench.eviction.budget import named
from kvbench.report.best import UNTOLD, Best
from kvbench.report.blocks import Block, Column, chosen, estimated, identity, number, percent, sized, starred
from kvbench.report.cells import SCORES, UNBOUNDED, ScoreCell
from kvbench.report.tables import TaskTable

ACROSS = 4  # tasks side by side


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the overview's tables: a cell and the table of its task.

    best: in the table of best methods, the leader and its rivals at one budget; `cell` is then the leader. None in the
    other tables.
    """

    table: TaskTable
    cell: ScoreCell
    best: Best | None = None


def overview(tables: Sequence[TaskTable]) -> Iterator[Block]:
    """Yield the blocks of the first page, for each group of comparable runs."""
    for group in dict.fromkeys(table.group for table in tables):
        mine = [table for table in tables if table.group == group]
        yield _matrix(group, mine)
        if any(table.best for table in mine):
            yield best_block(group, mine)
        yield frontier_block(group, mine)


def frontier(table: TaskTable) -> list[ScoreCell]:
    """Return the frontier of a task, sorted by rising bytes. A cell is on the frontier if all other cells with at most
    as many measured bytes have lower scores. Of cells with equal scores and bytes, only the first counts."""
    known = [c for c in table.cells if not math.isnan(c.score.mean) and not math.isnan(c.kv_bytes_peak)]
    kept: list[ScoreCell] = []
    for cell in sorted(known, key=lambda c: (c.kv_bytes_peak, -c.score.mean)):
        if not kept or cell.score.mean > kept[-1].score.mean:
            kept.append(cell)
    return kept


def _matrix(group: str, tables: Sequence[TaskTable]) -> Block:
    """Return a table of mean scores with the verdicts from the table of each task. It has a line per method and budget,
    and a column per task."""
    rows: dict[tuple[str, str], dict[str, ScoreCell]] = {}
    for table in tables:
        for cell in table.cells:
            rows.setdefault((cell.method, named(cell.budget)), {})[table.task] = cell
    lines = sorted(rows.values(), key=lambda by_task: _budget_order(_first(by_task)))
    tasks = [Column("", partial(_scored, table.task), table.task) for table in tables]
    names = chosen(identity(_first), ("method", "budget"))
    return Block(
        title=", ".join(filter(None, ("Overview", group))),
        lines=lines,
        grids=[[*names, *tasks[start : start + ACROSS]] for start in range(0, len(tasks), ACROSS)],
        notes=[
            f"Mean scores{_headlines(tables)}{_against(tables)}; the tables of each task have errors and differences.",
            *([UNBOUNDED] if any(cell.marked for table in tables for cell in table.cells) else []),
        ],
    )


def _headlines(tables: Sequence[TaskTable]) -> str:
    """Return the tasks whose main score is not the exact score, with the main score's name: " (walk: partial)"."""
    named = [f"{table.task}: {SCORES[table.headline]}" for table in tables if table.headline != "score"]
    return f" ({', '.join(dict.fromkeys(named))})" if named else ""


def _budget_order(cell: ScoreCell) -> tuple[bool, bool, float]:
    """Return the sort key of a cell: cells without a budget come first, then budgets in entries, then budgets as
    shares."""
    return cell.budget is not None, isinstance(cell.budget, float), float(cell.budget or 0)


def _first(by_task: dict[str, ScoreCell]) -> ScoreCell:
    return next(iter(by_task.values()))


def _scored(task: str, by_task: dict[str, ScoreCell]) -> str | None:
    cell = by_task.get(task)
    if cell is None or math.isnan(cell.score.mean):
        return None
    verdict = f" {cell.against.judged.verdict}" if cell.against else ""
    return f"{number(cell.score.mean)}{verdict}" + (f" ({cell.progress})" if cell.progress else "")


def _against(tables: Sequence[TaskTable]) -> str:
    """Return the words that name the baselines of the verdicts, such as " with verdicts against full"; "" without a
    verdict."""
    names = dict.fromkeys(cell.baseline for table in tables for cell in table.cells if cell.baseline)
    return f" with verdicts against {', '.join(names)}" if names else ""


def best_block(group: str, tables: Sequence[TaskTable]) -> Block:
    """Return a table of the best methods of each task at each budget."""
    columns = [
        Column("group", "table.group"),
        Column("task", "table.task", "task"),
        *sized(lambda place: place.cell),
        Column("method", "cell.method"),
        Column("", lambda place: starred(place.cell), "best", left=True),
        Column("", "cell.score", "score", estimated),
        Column("mean", "cell.score.mean"),
        Column("", "best", "not told apart from it", _rivals, left=True),
        Column("rivals", lambda place: [cell.method for cell in place.best.rivals]),
        Column("told", "best.told"),
    ]
    found = [best for table in tables for best in table.best]
    return Block(
        title=", ".join(filter(None, ("Best method per budget", group))),
        lines=[Place(table, best.leader, best) for table in tables for best in table.best],
        columns=columns,
        grids=[chosen(columns, ("task", "budget", "best", "score", "not told apart from it"))],
        notes=[
            "Best: the highest mean score on the questions that all methods at the budget have. Not told apart: "
            "methods whose score is not significantly lower, paired by question, with p Holm-adjusted over the budget. "
            "The best was chosen by its score, which favours it.",
            *([UNBOUNDED] if any(cell.marked for best in found for cell in (best.leader, *best.rivals)) else []),
        ],
    )


def _rivals(best: Best) -> str:
    if best.untold:
        return f"{best.untold}: {UNTOLD[best.untold]}"
    if len(best.rivals) == best.compared:
        return "all others" if best.compared > 1 else starred(best.rivals[0])
    return ", ".join(map(starred, best.rivals)) or "none"


def frontier_block(group: str, tables: Sequence[TaskTable]) -> Block:
    """Return a table of the frontier of each task, by rising bytes."""
    columns = [
        Column("group", "table.group"),
        Column("task", "table.task", "task"),
        *identity(lambda place: place.cell),
        Column("kv_bytes_peak", "cell.kv_bytes_peak", "KV peak", size),
        Column("bytes_of_full", "cell.of_full.bytes", "of full", percent),
        Column("mean", "cell.score.mean"),
        Column("", "cell.score", "score", estimated),
        Column("verdict", "cell.against.judged.verdict", "verdict"),
    ]
    return Block(
        title=", ".join(filter(None, ("Frontier of score against measured bytes", group))),
        lines=[Place(table, cell) for table in tables for cell in frontier(table)],
        columns=columns,
        grids=[chosen(columns, ("task", "method", "budget", "KV peak", "of full", "score", "verdict"))],
        notes=[
            "No other cell of the task has as high a mean score with as few bytes; of equal cells the first is listed. "
            "Small gains may be noise."
        ],
    )
