"""Verdicts on the comparisons of a table: one family, with p-values adjusted by Holm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.report.stats.compare import ALPHA, Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The printed verdict of a comparison.

    verdict: better, worse, tied (its interval holds zero), unclear (its interval excludes zero, but the adjusted p is
    above 5%) or unknown (at most five clusters: an exact test cannot reach 5%).
    `smallest_drop`: the true drop that gets `worse` with 80% power if the others of the family have none. Holm then
    tests it at its strictest step, alpha / comparisons, two-sided; with other drops in the family the power is higher.
    """

    p: float  # adjusted
    verdict: str
    smallest_drop: float


def judge(family: Sequence[Paired], alpha: float = ALPHA) -> list[Judged]:
    """Verdicts of the comparisons of one table, in the given order."""
    adjusted = holm([paired.p for paired in family])
    return [
        Judged(p=p, verdict=_verdict(paired, p, alpha), smallest_drop=paired.drop(alpha / len(family)))
        for paired, p in zip(family, adjusted)
    ]


def _verdict(paired: Paired, p: float, alpha: float) -> str:
    if paired.test == "none":
        return "unknown"
    if p <= alpha and paired.diff != 0:
        return "better" if paired.diff > 0 else "worse"
    # A difference whose own interval excludes zero is not called tied.
    return "tied" if paired.low <= 0 <= paired.high else "unclear"


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: reject those at or below alpha."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted
