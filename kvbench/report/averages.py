"""Means over the tasks of a group, as the group's task names them: LongBench's avg16, RULER's mean of 13.

    for table in make_averages(loaded.groups, tables):
        table.rows[0].means["avg16"].value, table.rows[0].means["avg16"].missing

A mean is of cells of one method at one budget, over tasks of one group, length and setting, weighted as the group says.
Its error takes the tasks as independent: sqrt(sum (w se)^2) with weights that sum to 1. Where a task is not there, no
mean is made, and what is missing is said.

A group that was run at all its lengths has three more: the mean of its first average over them, and with weights that
rise (inc) or fall (dec) linearly from the shortest to the longest, as in RULER's paper (arXiv 2404.06654).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import KVBenchError
from kvbench.eviction.budget import Budget, label
from kvbench.report.agree import SAME, values_of
from kvbench.report.cells import CellRow
from kvbench.report.load import Group
from kvbench.report.tables import TaskTable
from kvbench.task import Task
from kvbench.taskkit.names import base_name, get_task

NOTHING = "-"
EQUAL = [column for column in SAME if column != "max_new_tokens"]  # each task of a group has its own
ABOUT = "Means over tasks; their errors take the tasks as independent."


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A weighted mean over tasks, and its paired difference to the baseline; NaN where tasks are `missing`."""

    value: float
    se: float
    diff: float
    diff_se: float
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageRow:
    """One method at one budget. `progress`: "412 of 960 rows" of unfinished runs."""

    method: str
    budget: Budget | None
    marked: bool  # generated entries are not bounded by the budget
    baseline: str
    progress: str
    means: dict[str, Mean]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageTable:
    """The averages of one group of tasks; they stand behind the table of its last member."""

    task: str  # "longbench", "ruler@4096", "ruler@*" over lengths
    group: str
    interval: int | None
    last: TaskTable
    names: list[str]  # averages that some row has
    rows: list[AverageRow]
    notes: list[str]

    @property
    def title(self) -> str:
        evicting = f"evicting every {self.interval} tokens" if self.interval else ""
        return ", ".join(filter(None, (f"{self.task}: averages", self.group, evicting)))


@dataclass(frozen=True, slots=True)
class _Family:
    """Tables of the tasks of one group, by variant. `settings`: values of each column in any of them."""

    name: str
    label: str
    task: Task
    settings: dict[str, Any]
    members: dict[str, TaskTable]


def make_averages(groups: Sequence[Group], tables: Sequence[TaskTable]) -> list[AverageTable]:
    """The averages of all groups of tasks that have two members or more among the tables."""
    families: list[_Family] = []
    for group, table in zip(groups, tables, strict=True):
        try:
            task = get_task(table.task)
        except KVBenchError:  # not installed here
            continue
        if task.variant in {variant for weights in task.averages.values() for variant in weights}:
            _join(families, group, table, task)
    made = [(family, _averages(family)) for family in families if len(family.members) > 1]
    return [*(table for _, table in made), *_over_lengths(made)]


def _over_lengths(made: Sequence[tuple[_Family, AverageTable]]) -> list[AverageTable]:
    """The averages over all lengths of each group that has its first average at two or more."""
    kin: list[list[tuple[_Family, AverageTable]]] = []
    for family, table in made:
        if family.task.lengths and next(iter(family.task.averages)) in table.names:
            same = next((one for one in kin if all(_alike(family, other) for other, _ in one)), None)
            if same is None:
                kin.append([(family, table)])
            else:
                same.append((family, table))
    return [_lengths([family for family, _ in one], [table for _, table in one]) for one in kin if len(one) > 1]


def _alike(a: _Family, b: _Family) -> bool:
    """The same tasks under equal settings at another length."""
    same = base_name(a.name) == base_name(b.name) and a.label == b.label and a.task.length != b.task.length
    return same and all(b.settings.get(column, values) == values for column, values in a.settings.items())


def _lengths(families: Sequence[_Family], tables: Sequence[AverageTable]) -> AverageTable:
    task = families[0].task
    name = next(iter(task.averages))
    lengths = sorted(task.lengths)
    found: dict[tuple[str, Budget | None], dict[int, AverageRow]] = {}
    for family, table in zip(families, tables, strict=True):
        for row in table.rows:
            found.setdefault((row.method, row.budget), {})[family.task.length] = row
    count = len(lengths)
    weights = {
        f"{name}, all lengths": [1.0] * count,
        "inc": [float(n) for n in range(1, count + 1)],
        "dec": [float(n) for n in range(count, 0, -1)],
    }
    rows = [_length_row(members, name, lengths, weights) for members in found.values()]
    names = list(weights) if any(not row.means["inc"].missing for row in rows) else []
    return AverageTable(
        task=f"{base_name(families[0].name)}@*",
        group=families[0].label,
        interval=next((table.interval for table in tables if table.interval), None),
        last=tables[-1].last,
        names=names,
        rows=rows,
        notes=[*_missing(rows, list(weights)[:1]), *([ABOUT] if names else [])],
    )


def _length_row(
    members: Mapping[int, AverageRow], name: str, lengths: Sequence[int], weights: Mapping[str, Sequence[float]]
) -> AverageRow:
    first = next(iter(members.values()))
    means = {length: row.means[name] for length, row in members.items() if not row.means[name].missing}
    missing = tuple(f"@{length}" for length in lengths if length not in means)
    return AverageRow(
        method=first.method,
        budget=first.budget,
        marked=first.marked,
        baseline=_only({row.baseline for row in members.values()}),
        progress=", ".join(dict.fromkeys(row.progress for row in members.values() if row.progress)),
        means={
            title: _weighted([(w, means[length]) for w, length in zip(each, lengths)] if not missing else [], missing)
            for title, each in weights.items()
        },
    )


def _join(families: list[_Family], group: Group, table: TaskTable, task: Task) -> None:
    """Add a table to the family that it compares with, or to a new one."""
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
    cells: dict[tuple[str, Budget | None], dict[str, CellRow]] = {}
    for variant, table in family.members.items():
        for cell in table.cells:
            cells.setdefault((cell.method, cell.budget), {})[variant] = cell
    rows = [_row(members, family.task.averages) for members in cells.values()]
    names = [name for name in family.task.averages if any(not row.means[name].missing for row in rows)]
    tables = list(family.members.values())
    return AverageTable(
        task=family.name,
        group=family.label,
        interval=next((table.interval for table in tables if table.interval), None),
        last=tables[-1],
        names=names,
        rows=rows,
        notes=[*_missing(rows, list(family.task.averages)), *([ABOUT] if names else [])],
    )


def _row(members: Mapping[str, CellRow], averages: Mapping[str, Mapping[str, float]]) -> AverageRow:
    first = next(iter(members.values()))
    return AverageRow(
        method=first.method,
        budget=first.budget,
        marked=first.evicts and not first.decode_bounded,
        baseline=_only({cell.against.baseline if cell.against else "" for cell in members.values()}),
        progress=", ".join(dict.fromkeys(cell.progress for cell in members.values() if cell.progress)),
        means={name: _mean(members, weights) for name, weights in averages.items()},
    )


def _only(baselines: Collection[str]) -> str:
    """The one baseline that all have; empty where they differ."""
    return next(iter(baselines)) if len(baselines) == 1 else ""


def _mean(members: Mapping[str, CellRow], weights: Mapping[str, float]) -> Mean:
    missing = tuple(v for v in weights if v not in members or math.isnan(members[v].score.mean))
    return _weighted([] if missing else [(w, _one(members[variant])) for variant, w in weights.items()], missing)


def _one(cell: CellRow) -> Mean:
    """A cell as the mean of itself."""
    diff, diff_se = (cell.against.diff, cell.against.se) if cell.against else (math.nan, math.nan)
    return Mean(value=cell.score.mean, se=cell.score.se, diff=diff, diff_se=diff_se, missing=())


def _weighted(parts: Sequence[tuple[float, Mean]], missing: tuple[str, ...]) -> Mean:
    """Their weighted mean; NaN where any figure of a part is, and without parts."""
    if not parts:
        return Mean(value=math.nan, se=math.nan, diff=math.nan, diff_se=math.nan, missing=missing)
    total = sum(weight for weight, _ in parts)
    return Mean(
        value=sum(weight / total * part.value for weight, part in parts),
        se=math.hypot(*(weight / total * part.se for weight, part in parts)),
        diff=sum(weight / total * part.diff for weight, part in parts),
        diff_se=math.hypot(*(weight / total * part.diff_se for weight, part in parts)),
        missing=missing,
    )


def _missing(rows: Sequence[AverageRow], names: Sequence[str]) -> list[str]:
    """What keeps averages from being there, each reason once."""
    notes = []
    for name in names:
        lacking: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            lacking.setdefault(row.means[name].missing, []).append(_cell_name(row))
        for tasks, cells in lacking.items():
            where = "" if len(cells) == len(rows) else f" of {', '.join(cells)}"
            if tasks:
                notes.append(f"{name}{where}: {', '.join(tasks)} missing.")
    return notes


def _cell_name(row: AverageRow) -> str:
    return row.method if row.budget is None else f"{row.method} at {label(row.budget)}"


def columns(table: AverageTable, plus_minus: str) -> list[tuple[str, Callable[[AverageRow], str]]]:
    """What people see of a row; the difference is that of the first average."""

    def mean(row: AverageRow, name: str) -> str:
        text = _number(row.means[name].value, row.means[name].se, plus_minus)
        return f"{text} ({row.progress})" if row.progress and text != NOTHING else text

    def difference(row: AverageRow) -> str:
        one = row.means[table.names[0]]
        return _number(one.diff, one.diff_se, plus_minus, "+")

    made: list[tuple[str, Callable[[AverageRow], str]]] = [
        ("method", lambda row: row.method + " *" * row.marked),
        ("budget", lambda row: NOTHING if row.budget is None else label(row.budget)),
        *((name, lambda row, name=name: mean(row, name)) for name in table.names),
    ]
    baseline = next((row.baseline for row in table.rows if row.baseline), "")
    if baseline and any(difference(row) != NOTHING for row in table.rows):
        made.insert(3, (f"minus {baseline}", difference))
    return made


def flat(table: AverageTable, row: AverageRow) -> dict[str, Any]:
    """A row as plain data; None where there is no number."""
    return {
        "group": table.group,
        "task": table.task,
        "interval": table.interval,
        "method": row.method,
        "budget": None if isinstance(row.budget, float) else row.budget,
        "budget_share": row.budget if isinstance(row.budget, float) else None,
        "baseline": row.baseline or None,
        "progress": row.progress or None,
        "averages": {
            name: {
                "mean": _finite(one.value),
                "se": _finite(one.se),
                "diff": _finite(one.diff),
                "diff_se": _finite(one.diff_se),
                "missing": list(one.missing),
            }
            for name, one in row.means.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float, se: float, plus_minus: str, sign: str = "") -> str:
    if math.isnan(value):
        return NOTHING
    return f"{value:{sign}.3f}" + ("" if math.isnan(se) else f" {plus_minus}{se:.3f}")
