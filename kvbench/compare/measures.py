"""What a comparison shows beside the score: entries, bytes, lengths, truncation, speed.

Entries are exact: more of them is a regression. The others are shown, and fail only where a policy sets a limit: the
largest ratio, the largest increase of a share, or for speed the smallest ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.compare.matching import Pair
from kvbench.report.stats import regression

ENTRIES = ("entries_after_evict", "entries_peak")
RATIOS = ("kv_bytes_peak", "kv_bytes_mean", "output_tokens", "tokens_per_second", "evict_share")
SHARES = ("truncated", "no_answer")
LIMITED = (*RATIOS, *SHARES)  # that a policy may limit
HIGHER_IS_BETTER = ("tokens_per_second",)
WORDS = {
    "entries_after_evict": "entries after an eviction",
    "entries_peak": "entries at the peak",
    "kv_bytes_peak": "KV bytes at the peak",
    "kv_bytes_mean": "KV bytes on average",
    "output_tokens": "answer length",
    "truncated": "share of truncated answers",
    "no_answer": "share without an answer",
    "tokens_per_second": "tokens/s",
    "evict_share": "time in eviction",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a cell on both sides; NaN: unknown. more: it rose against what it may hold.

    p: of an increase, one-sided and paired by question; NaN for figures without a test.
    """

    name: str
    base: float
    new: float
    more: bool = False
    p: float = math.nan

    @property
    def words(self) -> str:
        return WORDS[self.name]

    @property
    def ratio(self) -> float:
        return self.new / self.base if self.base else math.nan

    def beyond(self, limit: float) -> bool:
        """Whether the new figure is beyond a policy's limit."""
        if self.name in SHARES:
            return self.new - self.base > limit
        return self.ratio < limit if self.name in HIGHER_IS_BETTER else self.ratio > limit


def measures(pair: Pair) -> list[Measure]:
    return [
        *(_entries(pair, name) for name in ENTRIES),
        *(_ratio(pair, name) for name in RATIOS if name != "output_tokens"),
        *(_counted(pair, name) for name in ("output_tokens", *SHARES)),
    ]


def _entries(pair: Pair, name: str) -> Measure:
    base, new = (side.figures.get(name, math.nan) for side in (pair.base, pair.new))
    allowed = base
    if name == "entries_peak":  # below the bound it follows the lengths of answers
        allowed = max(base, pair.new.figures.get("bound", math.inf) if pair.new.bounded else math.inf)
    return Measure(name=name, base=base, new=new, more=not pair.mapped and new > allowed)


def _ratio(pair: Pair, name: str) -> Measure:
    return Measure(name=name, **{side: getattr(pair, side).figures.get(name, math.nan) for side in ("base", "new")})


def _counted(pair: Pair, name: str) -> Measure:
    """A mean over shared questions with answers on both sides."""
    shared = [q for q in pair.shared if pair.base.questions[q].answers and pair.new.questions[q].answers]
    if not shared:
        return Measure(name=name, base=math.nan, new=math.nan)
    base, new = ([[cell.questions[q].share(name)] for q in shared] for cell in (pair.base, pair.new))
    clusters = [pair.base.questions[q].cluster for q in shared]
    return Measure(name=name, base=_mean(base), new=_mean(new), p=regression(new, base, clusters=clusters).p)


def _mean(values: Sequence[Sequence[float]]) -> float:
    return math.fsum(value for [value] in values) / len(values)
