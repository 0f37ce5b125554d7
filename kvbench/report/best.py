"""The best method at each budget of a task, and the methods that the data cannot tell apart from it.

    for best in best_per_budget(cells, scores, clusters):
        best.leader.method, [cell.method for cell in best.rivals], best.told

All methods at a budget are compared on the questions that all of them have. The leader is the method with the highest
mean score on these questions. Every other method is compared with the leader, question by question, with p-values that
Holm's method adjusts for all comparisons at this budget. A method that is not significantly worse is a rival. Choosing
the leader by its scores favours the leader: a list without rivals is weaker evidence than a single comparison planned
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.eviction.budget import named
from kvbench.report import stats
from kvbench.report.cells import ScoreCell

UNTOLD = {"cannot tell": "floor or ceiling", "unknown": "too few questions"}  # verdicts that say nothing, and why
PERMUTATIONS = 1_000  # random sign patterns per test; they estimate a p of 5% to within 0.7 percentage points


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best methods of a task at one budget: a leader and its rivals. `untold`: the verdict on the comparisons with
    the leader, if all have the verdict "cannot tell" or all have "unknown" (`stats.judge`); otherwise empty."""

    leader: ScoreCell
    rivals: list[ScoreCell]  # not significantly worse than the leader, in order of falling score
    compared: int  # number of methods compared with the leader
    untold: str

    @property
    def told(self) -> bool:
        """Whether the comparisons with the leader say anything."""
        return not self.untold


def best_per_budget(
    cells: Sequence[ScoreCell], scores: Sequence[Mapping[str, list[float]]], clusters: Mapping[str, str]
) -> list[Best]:
    """Return the best methods at each budget at which two or more methods have scores. A budget is left out if no
    question has scores of all methods at this budget.

    scores: for each cell, the samples' scores by question. clusters: the cluster of each question.
    """
    at: dict[str, list[int]] = {}
    for place, cell in enumerate(cells):
        if cell.budget is not None and not math.isnan(cell.score.mean):
            at.setdefault(named(cell.budget), []).append(place)
    found = []
    for places in (places for places in at.values() if len(places) > 1):
        mine = [scores[place] for place in places]
        if shared := [question for question in mine[0] if all(question in other for other in mine)]:
            by_cell = [[own[question] for question in shared] for own in mine]
            found.append(_best([cells[place] for place in places], by_cell, [clusters[q] for q in shared]))
    return found


def _best(cells: Sequence[ScoreCell], scores: Sequence[list[list[float]]], clusters: Sequence[str]) -> Best:
    """Return the leader among the cells at one budget, and its rivals. scores: for each cell, the samples' scores of
    each shared question. clusters: the cluster of each shared question."""
    means = [stats.question_means(own).mean() for own in scores]
    first, *others = sorted(range(len(cells)), key=lambda place: -means[place])
    paired = [
        stats.paired(scores[place], scores[first], clusters=clusters, permutations=PERMUTATIONS) for place in others
    ]
    judged = stats.judge(paired, floors=[cells[place].floor for place in others])
    verdicts = {one.verdict for one in judged}
    return Best(
        leader=cells[first],
        rivals=[cells[place] for place, one in zip(others, judged, strict=True) if one.verdict != "worse"],
        compared=len(others),
        untold=verdicts.pop() if len(verdicts) == 1 and verdicts <= {*UNTOLD} else "",
    )
