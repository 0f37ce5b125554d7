"""Separates two effects on a method's score: how the method scores entries, and which tokens it protects. The rows come
from runs with and without ``--protect``. Here M is the method, and R is `random`, which scores entries at random.

    own(M), own(R)            scores of M and of R, each with its own protection
    matched(M), matched(R)    scores of both under the same protection

    protection adds   matched(M) - own(M)
    scoring adds      matched(M) - matched(R)
    own scoring       own(M) - own(R)             as usual tables show it; mixes both effects

All differences are paired over the questions that both cells have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.eviction.budget import Budget
from kvbench.eviction.protection import OWN
from kvbench.report import stats
from kvbench.report.cells import (
    cells_of,
    clusters_of,
    decode_bounded,
    estimate,
    evicts,
    method_label,
    options_of,
    paired,
    present,
)
from kvbench.report.load import Group, Loaded
from kvbench.report.tables import shared_options

RANDOM = "random"  # the method that scores entries at random
OPTION = "protection"
Key = tuple[str, Budget | None, str]  # a cell: the label of its method, its budget and its protection


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A method under a protection that replaces the method's own protection.

    Attributes:
        matched: the method's score under this protection.
        own: the method's score under its own protection; None if no run has it.
        protection_adds, scoring_adds, own_scoring: the differences that the module's docstring defines. Each is None if
            its two cells share no question (one of them may not have been run), or if they are the same cell.
        judged: the verdict on `scoring_adds`.
        marked: whether generated entries are not bounded by the budget.
        idle: whether nothing was evicted under this protection.
    """

    method: str
    budget: Budget | None
    matched: stats.Estimate
    own: stats.Estimate | None
    protection_adds: stats.Paired | None
    scoring_adds: stats.Paired | None
    own_scoring: stats.Paired | None
    judged: stats.Judged | None = None
    marked: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedTable:
    """The methods of one task in one group of comparable rows under one protection."""

    group: str
    task: str
    interval: int | None
    protection: str
    models: list[str]
    lines: list[Matched]


@dataclass(slots=True)
class _Scores:
    """The scores of one task. cells: for each cell the samples' scores by question.

    random: the labels of the method `random`, one for each choice of its options. marked, idle: the cells for which the
    field of this name in `Matched` is True.
    """

    clusters: Mapping[str, str]
    random: set[str] = field(default_factory=set)
    marked: set[Key] = field(default_factory=set)
    idle: set[Key] = field(default_factory=set)
    cells: dict[Key, dict[str, list[float]]] = field(default_factory=dict)

    def estimate(self, key: Key) -> stats.Estimate | None:
        questions = self.cells.get(key)
        return None if questions is None else estimate(questions, self.clusters)

    def by_chance(self, budget: Budget | None, protection: str) -> Key:
        """Return the key of the cell that the method `random` has at this budget under this protection.

        If `random` was run there with several choices of options, the cell with the default options is taken. Without
        this cell, the first cell by label is taken. If `random` was not run there, no cell has the returned key.
        """
        labels = sorted(self.random, key=lambda label: (label != RANDOM, label))
        keys = [(label, budget, protection) for label in labels]
        return next((key for key in keys if key in self.cells), (RANDOM, budget, protection))

    def paired(self, a: Key, b: Key) -> stats.Paired | None:
        """Return the comparison of two cells on the questions that both have; None if they share no question, or if
        both are the same cell."""
        return None if a == b else paired(self.cells.get(a, {}), self.cells.get(b, {}), self.clusters)


def matched_tables(loaded: Loaded) -> list[MatchedTable]:
    """Return the tables of all groups of comparable rows; each group belongs to one task. A group has one table for
    each protection that replaces the methods' own protection."""
    shared = shared_options(loaded)
    return [table for group in loaded.groups for table in _of_group(group, shared)]


def _of_group(group: Group, shared: Mapping[str, Mapping[str, Any]]) -> list[MatchedTable]:
    rows, headline = group.rows, group.scoring.headline
    scores = _Scores(clusters_of(rows))
    for _, budget, part in cells_of(rows, shared):
        method, options = part.values("method")[0], part.values("options")[0]
        label, protection = _apart(method, options, shared[method])
        if protection is not None:
            key = label, budget, protection
            scores.cells[key] = part.scores(headline)
            scores.random |= {label} if method == RANDOM else set()
            scores.marked |= {key} if evicts(part) and not decode_bounded(part) else set()
            scores.idle |= {key} if evicts(part) and not len(present(part.number("entries_after_evict"))) else set()
    intervals = rows.firsts("interval")
    return [
        MatchedTable(
            group=group.label,
            task=group.task,
            interval=intervals[0][1] if intervals else None,
            protection=protection,
            models=rows.values("model"),
            lines=_lines(scores, protection),
        )
        for protection in dict.fromkeys(protection for _, _, protection in scores.cells)
        if protection != OWN
    ]


def _apart(method: str, options: str, shared: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return two values: a method's label without the option `protection`, and the protection. The protection of two
    combined methods is None if they have different protections."""
    given = options_of(options)
    replaced = [value for name, value in given.items() if name.rpartition(".")[2] == OPTION]
    others = {name: value for name, value in given.items() if name.rpartition(".")[2] != OPTION}
    label, parts = method_label(method, json.dumps(others), shared), len(method.split("+"))
    if replaced and (len(replaced) < parts or len(set(replaced)) > 1):
        return label, None
    return label, replaced[0] if replaced else OWN


def _lines(scores: _Scores, protection: str) -> list[Matched]:
    lines = []
    for label, budget, of in scores.cells:
        if of != protection:
            continue
        here, before = (label, budget, protection), (label, budget, OWN)
        matched = scores.estimate(here)
        assert matched is not None
        lines.append(
            Matched(
                method=label,
                budget=budget,
                matched=matched,
                own=scores.estimate(before),
                protection_adds=scores.paired(here, before),
                scoring_adds=scores.paired(here, scores.by_chance(budget, protection)),
                own_scoring=scores.paired(before, scores.by_chance(budget, OWN)),
                marked=here in scores.marked,
                idle=here in scores.idle,
            )
        )
    return _judged(lines)


def _judged(lines: Sequence[Matched]) -> list[Matched]:
    """Return the lines with verdicts on `scoring_adds`; all lines are one family for Holm's correction."""
    family = [line for line in lines if line.scoring_adds is not None]
    verdicts = stats.judge([line.scoring_adds for line in family if line.scoring_adds], floors=[0.0] * len(family))
    found = {id(line): verdict for line, verdict in zip(family, verdicts)}
    return [replace(line, judged=found.get(id(line))) for line in lines]
