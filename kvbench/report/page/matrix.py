"""Compares the methods of a task in pairs at the same budget: paired differences of scores, with verdicts.

    for matrix in matrices(scored):
        matrix.between("gkv", "h2o").verdict

Every pair of the first `MOST_METHODS` methods is compared on the questions that both have, with the test of the
report's tables (`kvbench.report.stats.paired`). The family for Holm's correction is every compared pair of the task, at
all budgets. A pair of methods without a budget is shown at every budget, but is compared and counted once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvbench.eviction.budget import named
from kvbench.report import stats
from kvbench.report.page.scored import Cell, Scored

Pair = tuple[Cell, Cell]
PERMUTATIONS = 10_000  # largest number of sign patterns, for pairs whose p comes from the test by sign flips
MOST_METHODS = 16  # methods in one matrix; a wider matrix cannot be read
SIGNS = {"better": "▲", "worse": "▼", "tied": "=", "unclear": "?", "cannot tell": "≈", "unknown": "·"}
OPPOSITE = {"better": "worse", "worse": "better"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A comparison of two methods. `diff`: the mean score of the first minus the mean score of the second. `low`,
    `high`: the ends of the 95% interval of `diff`; NaN if the test gives no interval."""

    diff: float
    low: float
    high: float
    p: float  # adjusted
    verdict: str
    questions: int

    @property
    def sign(self) -> str:
        return SIGNS[self.verdict]

    @property
    def brief(self) -> str:
        """The difference as text with two decimals, or with three if two would show 0."""
        digits = 2 if abs(self.diff) >= 0.005 else 3
        return f"{round(self.diff, digits) + 0.0:+.{digits}f}"  # + 0.0 turns -0.0 into 0.0

    def reversed(self) -> Difference:
        verdict = OPPOSITE.get(self.verdict, self.verdict)
        return Difference(-self.diff, -self.high, -self.low, self.p, verdict, self.questions)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The differences between all pairs of methods at one budget. Methods without a budget, such as the full cache, are
    included. `family`: the number of comparisons over which p-values are adjusted. `left_out`: the number of methods
    that are not shown, because the matrix shows at most `MOST_METHODS`."""

    budget: str  # as `named` writes it
    methods: list[str]
    pairs: dict[tuple[str, str], Difference]
    family: int
    left_out: int

    def between(self, a: str, b: str) -> Difference | None:
        """Return the comparison of method `a`, as the first method, with method `b`; None if `a` and `b` are the same
        method or share no question."""
        if (a, b) in self.pairs:
            return self.pairs[a, b]
        return self.pairs[b, a].reversed() if (b, a) in self.pairs else None


def matrices(scored: Scored) -> list[Matrix]:
    """Return one matrix per budget of a task; if no method has a budget, a single matrix. A matrix with fewer than two
    methods is left out. scored: the scores of the task."""
    budgets = scored.budgets or [named(None)]
    chosen = {budget: _methods(scored, budget) for budget in budgets}
    pairs = {budget: list(_pairs(scored, cells)) for budget, (cells, _) in chosen.items()}
    found = _differences(scored, dict.fromkeys(pair for of in pairs.values() for pair in of))
    return [
        Matrix(
            budget,
            [method for method, _ in cells],
            {(a[0], b[0]): found[a, b] for a, b in pairs[budget] if (a, b) in found},
            len(found),
            left_out,
        )
        for budget, (cells, left_out) in chosen.items()
        if len(cells) > 1
    ]


def _pairs(scored: Scored, cells: list[Cell]) -> Iterator[Pair]:
    """Yield all pairs of cells. The second cell of a pair has the higher or an equal mean, because `stats.judge` counts
    drops from the second cell's score."""
    means = {(cell.method, named(cell.budget)): cell.score.mean for cell in scored.table.cells}
    for a, b in itertools.combinations(cells, 2):
        yield (a, b) if means[a] <= means[b] else (b, a)


def _differences(scored: Scored, pairs: Iterable[Pair]) -> dict[Pair, Difference]:
    """Return the differences of the pairs that share a question. All pairs are one family for Holm's correction."""
    floors = {(cell.method, named(cell.budget)): cell.floor for cell in scored.table.cells}
    tested = {(a, b): found for a, b in pairs if (found := _paired(scored, a, b)) is not None}
    judged = stats.judge(list(tested.values()), floors=[floors[a] for a, _ in tested])
    return {
        pair: Difference(one.diff, max(one.low, -1.0), min(one.high, 1.0), result.p, result.verdict, one.questions)
        for (pair, one), result in zip(tested.items(), judged, strict=True)
    }


def _methods(scored: Scored, budget: str) -> tuple[list[Cell], int]:
    """Return two values: the first MOST_METHODS of the cells that have this budget or none, and the number of further
    such cells, which are left out."""
    cells = [cell for cell in scored.cells if cell[1] in (named(None), budget)]
    return cells[:MOST_METHODS], max(0, len(cells) - MOST_METHODS)


def _paired(scored: Scored, a: Cell, b: Cell) -> stats.Paired | None:
    first, second = scored.cells[a], scored.cells[b]
    if not (shared := [question for question in first if question in second]):
        return None
    clusters = [scored.clusters[question] for question in shared]
    flips = stats.Clusters.make(clusters, len(shared)).lopsided  # p comes from sign flips; otherwise from t
    return stats.paired(
        [first[q] for q in shared],
        [second[q] for q in shared],
        clusters=clusters,
        permutations=PERMUTATIONS if flips else 1,
    )
