"""Verdicts on the comparisons of one table. The comparisons are one family for Holm's correction of p-values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.report.stats.compare import ALPHA, Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The printed verdict of a comparison.

    verdict: one of six texts.
        better, worse: the adjusted p is at most 5%.
        tied: the confidence interval contains zero.
        unclear: the interval excludes zero, but the adjusted p is above 5%.
        cannot tell: a tie that says nothing, see `judge`.
        unknown: there are at most five clusters, and with so few an exact test cannot reach 5%.

    `smallest_drop`: the smallest true drop that gets the verdict `worse` with 80% power if no other comparison of the
    family has a drop. Holm's correction then tests this comparison two-sided at the strictest level, alpha / (number of
    comparisons). If other comparisons have drops, the power is higher.

    `room`: the largest possible drop: the baseline's mean score minus the floor.
    """

    p: float  # adjusted
    verdict: str
    smallest_drop: float
    room: float = math.inf


def judge(family: Sequence[Paired], *, floors: Sequence[float] | None = None) -> list[Judged]:
    """Return the verdicts on the comparisons of one table, in the given order.

    Args:
        floors: for each comparison, the score below which no method falls; NaN stands for 0. Without floors, scores
            may be any numbers, and a tie stays a tie. With floors, scores must lie between the floor and 1, and a tie
            becomes "cannot tell" in three cases:
            - at the floor: the comparison's `smallest_drop` is larger than its `room` (see `Judged`);
            - at the ceiling: in every comparison of the table, both means are closer to 1 than `smallest_drop`;
            - too few clusters: `smallest_drop` is NaN, because the test finds no drop.
    """
    adjusted = holm([paired.p for paired in family])
    drops = [paired.drop(ALPHA / len(family)) for paired in family]
    rooms = [math.inf] * len(family)
    if floors is not None:
        lowest = [0.0 if math.isnan(floor) else floor for floor in floors]
        rooms = [max(0.0, paired.mean_b - floor) for paired, floor in zip(family, lowest)]
    ceiling = floors is not None and all(1 - min(one.mean_a, one.mean_b) < drop for one, drop in zip(family, drops))
    return [
        Judged(
            p=p,
            verdict=_verdict(paired, p, sees=floors is None or (drop <= room and not ceiling)),
            smallest_drop=drop,
            room=room,
        )
        for paired, p, drop, room in zip(family, adjusted, drops, rooms)
    ]


def _verdict(paired: Paired, p: float, *, sees: bool) -> str:
    if paired.test == "none":
        return "unknown"
    if p <= ALPHA and paired.diff != 0:
        return "better" if paired.diff > 0 else "worse"
    # A difference whose own interval excludes zero is not called tied.
    tie = "tied" if sees else "cannot tell"
    return tie if paired.low <= 0 <= paired.high else "unclear"


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values with Holm's correction, in the given order. A test rejects at level alpha if its corrected
    p-value is at most alpha."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted
