"""The best method at each budget of a task, and the methods that its data do not tell apart from it.

    for best in best_per_budget(cells, scores, clusters):
        best.leader.method, [cell.method for cell in best.rivals], best.told

The leader has the highest mean score. Every other method at the budget is compared with it, question by question, with
p-values adjusted by Holm over the budget. A method that is not significantly worse stays a rival. The leader is chosen
after its scores were seen, which favours it: a list without rivals is weaker evidence than one comparison planned
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.eviction.budget import Budget
from kvbench.report import stats
from kvbench.report.cells import ScoreCell

PERMUTATIONS = 1_000  # sign flips; p of 5% is then known to 0.7 points


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The methods of a task at one budget. `told`: False where all scores are at the floor or at the ceiling."""

    budget: Budget
    leader: ScoreCell
    rivals: list[ScoreCell]  # not significantly worse than the leader, by falling score
    compared: int  # methods beside the leader
    told: bool


def best_per_budget(
    cells: Sequence[ScoreCell], scores: Sequence[Mapping[str, list[float]]], clusters: Mapping[str, str]
) -> list[Best]:
    """The best methods of each budget at which two methods or more have scores."""
    at: dict[Budget, list[int]] = {}
    for place, cell in enumerate(cells):
        if cell.budget is not None and not math.isnan(cell.score.mean):
            at.setdefault(cell.budget, []).append(place)
    return [_best(budget, places, cells, scores, clusters) for budget, places in at.items() if len(places) > 1]


def _best(
    budget: Budget,
    places: Sequence[int],
    cells: Sequence[ScoreCell],
    scores: Sequence[Mapping[str, list[float]]],
    clusters: Mapping[str, str],
) -> Best:
    first, *others = sorted(places, key=lambda place: -cells[place].score.mean)
    pairs = {place: _paired(scores[place], scores[first], clusters) for place in others}
    known = {place: paired for place, paired in pairs.items() if paired is not None}
    judged = dict(zip(known, stats.judge(list(known.values()), floors=[cells[place].floor for place in known])))
    verdicts = [one.verdict for one in judged.values()]
    return Best(
        budget=budget,
        leader=cells[first],
        rivals=[cells[place] for place in others if place not in judged or judged[place].verdict != "worse"],
        compared=len(others),
        told=not verdicts or any(verdict != "cannot tell" for verdict in verdicts),
    )


def _paired(
    mine: Mapping[str, list[float]], leader: Mapping[str, list[float]], clusters: Mapping[str, str]
) -> stats.Paired | None:
    """A method against the leader over the questions that both have; None without one."""
    shared = [question for question in mine if question in leader]
    if not shared:
        return None
    return stats.paired(
        [mine[question] for question in shared],
        [leader[question] for question in shared],
        clusters=[clusters[question] for question in shared],
        permutations=PERMUTATIONS,
    )
