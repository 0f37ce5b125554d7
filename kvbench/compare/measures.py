"""The measures that a comparison shows beside the score: entries, bytes, lengths, truncation, speed.

Entries are exact: a question that needs more of them is a regression (`_of_questions` states the exceptions). The other
measures are only shown, unless a policy sets a limit for them. For a share the limit is the largest increase, new -
base; for speed the smallest ratio new / base; for every other measure the largest ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.compare.cell import ENTRIES
from kvbench.compare.matching import Pair
from kvbench.report.stats import regression

AFTER, PEAK, BOUND = range(len(ENTRIES))
RATIOS = ("kv_bytes_peak", "kv_bytes_mean", "output_tokens", "tokens_per_second", "evict_share")
SHARES = ("truncated", "no_answer")
LIMITED = (*RATIOS, *SHARES)  # measures that a policy may limit
HIGHER_IS_BETTER = ("tokens_per_second",)
ROUNDING = 1e-9  # rounding error that a ratio or share exactly at its limit may have
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
    """One measure of a cell on both sides of a comparison, `base` and `new`; NaN: unknown.

    more: whether some question holds more entries in `new`, which is a regression; False if the measure does not count
    entries. p: the p-value of a one-sided test, paired by question; a small p shows that the measure rose. NaN for
    measures without a test.
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
        """Return whether the new figure is beyond a policy's limit. If the limit is a largest ratio and the figure of
        base is 0, every increase is beyond the limit."""
        if self.name in SHARES:
            return self.new - self.base > limit + ROUNDING
        if self.name in HIGHER_IS_BETTER:
            return self.new < self.base * limit * (1 - ROUNDING)
        return self.new > self.base * limit * (1 + ROUNDING)

    @property
    def lost(self) -> bool:
        """Whether base has this figure and new does not."""
        return math.isnan(self.new) and not math.isnan(self.base)


def measures(pairs: Sequence[Pair]) -> list[Measure]:
    """Return the measures of a cell. pairs: the cell on both sides, once per seed."""
    return [
        *(_entries(pairs, place) for place in (AFTER, PEAK)),
        *(_ratio(pairs, name) for name in RATIOS if name != "output_tokens"),
        *(_counted(pairs, name) for name in ("output_tokens", *SHARES)),
    ]


def _entries(pairs: Sequence[Pair], place: int) -> Measure:
    """Return the measure of the entries that `ENTRIES[place]` names. pairs: the cell on both sides, once per seed. If
    the number of entries rose for some questions, `base` and `new` are those of the question where the number rose
    most. Otherwise `base` and `new` are the largest number of any question on that side."""
    found = [(*values, pair.renamed) for pair in pairs for values in _of_questions(pair, place)]
    risen = [
        (mine, theirs)
        for mine, theirs, bound, renamed in found
        if not renamed and theirs > (max(mine, bound) if place == PEAK else mine)
    ]
    if risen:
        base, new = max(risen, key=lambda both: both[1] - both[0])
    else:
        base, new = (_most([values[side] for values in found]) for side in (0, 1))
    return Measure(name=ENTRIES[place], base=base, new=new, more=bool(risen))


def _of_questions(pair: Pair, place: int) -> Iterator[tuple[float, float, float]]:
    """Yield (entries in base, entries in new, bound) of each question that has the same samples on both sides. Other
    questions are left out, because more samples may have a larger maximum.

    The bound is budget + interval. Below it, the peak follows the lengths of answers: a rise of the peak is a
    regression only if the new peak is beyond the bound. The bound is infinite if the budget does not bound generated
    entries; then no rise of the peak is a regression.
    """
    for name in pair.shared:
        mine, theirs = pair.base.questions[name], pair.new.questions[name]
        if mine.answered == theirs.answered:
            bound = theirs.entries[BOUND] if pair.new.bounded else None
            base, new = (_number(question.entries[place], math.nan) for question in (mine, theirs))
            yield base, new, _number(bound, math.inf)


def _number(value: float | None, unknown: float) -> float:
    return unknown if value is None else float(value)


def _most(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _ratio(pairs: Sequence[Pair], name: str) -> Measure:
    """Return a measure whose `base` and `new` are means of the figure `name` over the pairs. A pair is the cell on both
    sides with one seed. Each cell's figure covers all answers of the cell, even if the two sides answered different
    questions."""
    base = [pair.base.figures.get(name, math.nan) for pair in pairs]
    new = [pair.new.figures.get(name, math.nan) for pair in pairs]
    return Measure(name=name, base=_mean([base]), new=_mean([new]))


def _counted(pairs: Sequence[Pair], name: str) -> Measure:
    """Return a measure whose `base` and `new` are means of `name` over the shared questions that have answers on both
    sides."""
    base: dict[str, list[float]] = {}
    new: dict[str, list[float]] = {}
    clusters: dict[str, str] = {}
    for pair in pairs:
        for question in pair.shared:
            mine, theirs = pair.base.questions[question], pair.new.questions[question]
            if mine.answers and theirs.answers:
                base.setdefault(question, []).append(mine.share(name))
                new.setdefault(question, []).append(theirs.share(name))
                clusters[question] = mine.cluster
    if not base:
        return Measure(name=name, base=math.nan, new=math.nan)
    tested = regression([*new.values()], [*base.values()], clusters=[*clusters.values()])
    return Measure(name=name, base=_mean(base.values()), new=_mean(new.values()), p=tested.p)


def _mean(values: Iterable[Sequence[float]]) -> float:
    every = [value for row in values for value in row]
    return math.fsum(every) / len(every)
