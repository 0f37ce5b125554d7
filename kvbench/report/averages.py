"""Means over the tasks of a group, such as LongBench's avg16 or RULER's mean of 13. The class of a group's tasks
declares the group's means: their names and weights.

    for table in make_averages(loaded.groups, tables):
        table.rows[0].means["avg16"].value, table.rows[0].means["avg16"].missing

Each mean belongs to one method at one budget. It is a weighted mean (`kvbench.report.weighted`) over the group's tasks
at one length and under equal settings. If a task is missing, there is no mean, and a note names the task.

If a group was run at all its lengths, the mean that the class declares first is also averaged over the lengths, three
times: the weights of the lengths are equal, or they rise (inc) or fall (dec) linearly from the shortest length to the
longest, as in RULER's paper (arXiv 2404.06654).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.errors import KVBenchError
from kvbench.eviction.budget import Budget, named
from kvbench.report.agree import SAME, values_of
from kvbench.report.blocks import NAMED, Block, Column, chosen, difference, with_error, with_interval
from kvbench.report.cells import ScoreCell, at_budget
from kvbench.report.load import Group
from kvbench.report.tables import TaskTable
from kvbench.report.weighted import Mean, of_cell, seen_drop, weighted_mean
from kvbench.task import Task
from kvbench.taskkit.names import base_name, get_task

EQUAL = [column for column in SAME if column != "max_new_tokens"]  # each task sets max_new_tokens itself
ABOUT = "Means over tasks. Their errors assume that the tasks are independent."


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageRow:
    """The averages of one method at one budget. `baseline`: the method with which `means` compares the averages.
    `progress`: how far the unfinished cells behind these averages are, as in "3 of 16 rows"."""

    method: str
    budget: Budget | None
    marked: bool  # generated entries are not bounded by the budget
    baseline: str
    progress: str
    means: dict[str, Mean]


Part = tuple[ScoreCell | AverageRow, Mean]  # (a cell or a line of averages, its score as a `Mean`)
Averages = Mapping[str, Mapping[str, float]]  # for each average: the weight of each task or length


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageTable:
    """The averages of one group of tasks, printed below the table of the group's last task."""

    task: str  # the group of tasks: "longbench", "ruler@4096", or "ruler@*" for averages over lengths
    group: str  # label of the comparable rows, as in `load.Group`
    interval: int | None
    last: TaskTable
    names: list[str]  # averages that at least one line has
    rows: list[AverageRow]
    notes: list[str]

    def block(self) -> Block:
        evicting = f"evicting every {self.interval} tokens" if self.interval else ""
        return Block(
            title=", ".join(filter(None, (f"{self.task}: averages", self.group, evicting))),
            lines=self.rows,
            columns=[
                Column("group", lambda _: self.group),
                Column("task", lambda _: self.task),
                Column("interval", lambda _: self.interval),
                *NAMED,
                Column("baseline", lambda row: row.baseline or None),
                Column("progress", lambda row: row.progress or None),
                Column("averages", lambda row: {name: mean.data() for name, mean in row.means.items()}),
            ],
            grids=[self._shown()] if self.names else [],
            notes=self.notes,
            drops_empty=True,
        )

    def _shown(self) -> list[Column]:
        """Return the columns of the table: method, budget and each average. If there is a baseline, a column
        with the difference of the first average to the baseline follows the first average."""
        first, *others = [Column("", partial(_value, name), name) for name in self.names]
        baseline = next((row.baseline for row in self.rows if row.baseline), "")
        difference = Column("", lambda row: _difference(row.means[first.header]), f"minus {baseline}")
        return [*chosen(NAMED, ("method", "budget")), first, *([difference] if baseline else []), *others]


@dataclass(frozen=True, slots=True)
class _Family:
    """Comparable tables of the tasks of one group, such as LongBench.

    `label`: how the rows of these tables differ from the other rows of the same tasks. `members`: the tables by task
    variant. `settings`: for each column in `EQUAL` the values that these tables have.
    """

    name: str
    label: str
    task: Task
    settings: dict[str, Any]
    members: dict[str, TaskTable]


def make_averages(groups: Sequence[Group], tables: Sequence[TaskTable]) -> list[AverageTable]:
    """Return the averages of every group of tasks that has two or more tasks with comparable tables, then the averages
    over lengths. Tasks that are not installed here are left out."""
    families: list[_Family] = []
    for group, table in zip(groups, tables, strict=True):
        try:
            task = get_task(table.task)
        except KVBenchError:  # not installed here
            continue
        if task.variant in {variant for weights in task.averages.values() for variant in weights}:
            _join(families, group, table, task)
    averaged = [(family, _averages(family)) for family in families if len(family.members) > 1]
    return [*(table for _, table in averaged), *_over_lengths(averaged)]


def _over_lengths(averaged: Sequence[tuple[_Family, AverageTable]]) -> list[AverageTable]:
    """Return tables that average the main average of a group of tasks (the first in `Task.averages`) over lengths of
    prompts. A group gets a table if it has this average at two or more lengths. If a method at a budget lacks this
    average at one of the lengths, it gets no averages over lengths; a note names the missing lengths."""
    kin: list[list[tuple[_Family, AverageTable]]] = []
    for family, table in averaged:
        if family.task.lengths and next(iter(family.task.averages)) in table.names:
            same = next((one for one in kin if all(_alike(family, other) for other, _ in one)), None)
            if same is None:
                kin.append([(family, table)])
            else:
                same.append((family, table))
    return [_lengths(one) for one in kin if len(one) > 1]


def _alike(a: _Family, b: _Family) -> bool:
    """Return whether two families are the same group of tasks under equal settings, at different lengths."""
    same = base_name(a.name) == base_name(b.name) and a.label == b.label and a.task.length != b.task.length
    return same and all(b.settings.get(column, values) == values for column, values in a.settings.items())


def _lengths(kin: Sequence[tuple[_Family, AverageTable]]) -> AverageTable:
    """Return the table of the three averages over prompt lengths of one group of tasks. kin: the group at each length,
    with the table of this length."""
    family, tables = kin[0][0], [table for _, table in kin]
    name = next(iter(family.task.averages))
    lengths = [f"@{length}" for length in sorted(family.task.lengths)]
    rising = [float(place) for place in range(1, len(lengths) + 1)]
    averages = {
        f"{name}, all lengths": dict.fromkeys(lengths, 1.0),
        "inc": dict(zip(lengths, rising)),
        "dec": dict(zip(lengths, reversed(rising))),
    }
    members = {f"@{at.task.length}": [(row, row.means[name]) for row in table.rows] for at, table in kin}
    interval = next((table.interval for table in tables if table.interval), None)
    title = f"{base_name(family.name)}@*"
    return _table(title, family.label, interval, tables[-1].last, members, averages, list(averages)[:1])


def _join(families: list[_Family], group: Group, table: TaskTable, task: Task) -> None:
    """Add a task's table to the family with which it is comparable, or to a new family."""
    name = base_name(table.task) + (f"@{task.length}" if task.length else "")
    settings = {column: values for column in EQUAL if (values := values_of(group.rows, column)) != [None]}
    for family in families:
        agrees = all(family.settings.get(column, values) == values for column, values in settings.items())
        if (family.name, family.label) == (name, group.label) and agrees and task.variant not in family.members:
            family.settings.update(settings)
            family.members[task.variant] = table
            return
    families.append(_Family(name, group.label, task, settings, {task.variant: table}))


def _averages(family: _Family) -> AverageTable:
    averages = family.task.averages
    tables = list(family.members.values())
    members = {variant: [(cell, of_cell(cell)) for cell in table.cells] for variant, table in family.members.items()}
    interval = next((table.interval for table in tables if table.interval), None)
    return _table(family.name, family.label, interval, tables[-1], members, averages, list(averages))


def _table(
    task: str,
    group: str,
    interval: int | None,
    last: TaskTable,
    members: Mapping[str, Sequence[Part]],
    averages: Averages,
    explained: Sequence[str],
) -> AverageTable:
    """Return a table of averages with one line per method and budget. `last`: the table below which it is printed.
    `members`: for each task, or length, its cells with their means. `averages`: for each average its weights by task or
    length. `explained`: the averages for which a note names the missing members."""
    parts: dict[tuple[str, str], dict[str, Part]] = {}
    for member, cells in members.items():
        for cell, mean in cells:
            parts.setdefault((cell.method, named(cell.budget)), {})[member] = cell, mean
    rows = [_row(by_member, averages) for by_member in parts.values()]
    names = [name for name in averages if any(not row.means[name].missing for row in rows)]
    notes = [
        *_missing(rows, explained),
        *([ABOUT, *seen_drop(names[0], [row.means[names[0]] for row in rows])] if names else []),
    ]
    return AverageTable(task=task, group=group, interval=interval, last=last, names=names, rows=rows, notes=notes)


def _row(parts: Mapping[str, Part], averages: Averages) -> AverageRow:
    cells = [cell for cell, _ in parts.values()]
    baselines = {cell.baseline for cell in cells}
    return AverageRow(
        method=cells[0].method,
        budget=cells[0].budget,
        marked=cells[0].marked,
        baseline=cells[0].baseline if len(baselines) == 1 else "",
        progress=", ".join(dict.fromkeys(cell.progress for cell in cells if cell.progress)),
        means={name: _mean(parts, weights) for name, weights in averages.items()},
    )


def _mean(parts: Mapping[str, Part], weights: Mapping[str, float]) -> Mean:
    """Return the mean of the parts (tasks, or lengths) with these weights. A figure of the mean is NaN if a part has
    NaN for this figure. If a part that has a weight is missing or has no score, every figure is NaN."""
    missing = tuple(member for member in weights if member not in parts or math.isnan(parts[member][1].value))
    if missing:
        return Mean(missing=missing)
    total = sum(weights.values())
    return weighted_mean([(weight / total, parts[member][1]) for member, weight in weights.items()])


def _missing(rows: Sequence[AverageRow], names: Sequence[str]) -> list[str]:
    """Return notes on the tasks or lengths that the averages in `names` lack. Methods that lack the same tasks or
    lengths share a note."""
    notes = []
    for name in names:
        lacking: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            lacking.setdefault(row.means[name].missing, []).append(at_budget(row.method, row.budget))
        for tasks, cells in lacking.items():
            where = "" if len(cells) == len(rows) else f" of {', '.join(cells)}"
            if tasks:
                notes.append(f"{name}{where}: {', '.join(tasks)} missing.")
    return notes


def _value(name: str, row: AverageRow) -> str | None:
    mean = row.means[name]
    if math.isnan(mean.value):
        return None
    text = with_error(mean.value, mean.se) if mean.spread else with_interval(mean.value, mean.low, mean.high)
    return f"{text} ({row.progress})" if row.progress else text


def _difference(mean: Mean) -> str | None:
    if math.isnan(mean.diff):
        return None
    if mean.diff_spread:
        return with_error(mean.diff, mean.diff_se, sign="+")
    return difference(mean.diff, mean.diff_low, mean.diff_high)
