"""The measures that a comparison shows beside the score: entries, bytes, lengths, truncation, speed.

Numbers of entries do not vary by chance: if a question needs more entries in the new run, that is a regression
(`_entries` and `_of_questions` state the exceptions). The other measures are only shown, unless a policy sets a limit
for them. The limit of a share of answers (`SHARES`) is its largest allowed increase, new - base. The limit of speed is
the smallest allowed ratio new / base, and the limit of any other measure is the largest allowed ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.compare.cell import ENTRIES
from kvbench.compare.matching import Pair
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.report.stats import regression

AFTER, PEAK, BOUND = range(len(ENTRIES))
RATIOS = ("kv_bytes_peak", "kv_bytes_mean", "output_tokens", "tokens_per_second", "evict_share")
SHARES = ("truncated", "no_answer")
LIMITED = (*RATIOS, *SHARES)  # measures that a policy may limit
HIGHER_IS_BETTER = ("tokens_per_second",)
ROUNDING = 1e-9  # largest rounding error of a ratio or share that is exactly at its limit
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
    """One measure of a cell. base, new: its figure on the two sides of a comparison; NaN: unknown.

    more: whether the entries of some question rose in `new` by more than `_entries` allows, which is a regression;
    False if the measure does not count entries. p: the p-value of a one-sided test, paired by question; a small p means
    that the measure rose. NaN for measures without a test.
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
        """Return whether the figure of new is beyond a policy's limit. If the limit is a largest ratio and the figure
        of base is 0, every increase is beyond the limit."""
        if self.name in SHARES:
            return self.new - self.base > limit + ROUNDING
        if self.name in HIGHER_IS_BETTER:
            return self.new < self.base * limit * (1 - ROUNDING)
        return self.new > self.base * limit * (1 + ROUNDING)

    @property
    def lost(self) -> bool:
        """Whether base has a figure for this measure, and new has none."""
        return math.isnan(self.new) and not math.isnan(self.base)


def measures(pairs: Sequence[Pair]) -> list[Measure]:
    """Return the measures of a cell. pairs: for each seed, the cell on both sides."""
    return [
        *(_entries(pairs, place) for place in (AFTER, PEAK)),
        *(_ratio(pairs, name) for name in RATIOS if name != "output_tokens"),
        *(_counted(pairs, name) for name in ("output_tokens", *SHARES)),
    ]


def _entries(pairs: Sequence[Pair], place: int) -> Measure:
    """Return the measure `ENTRIES[place]`, a number of entries.

    A rise counts if the number in `new` is above the question's limit (see `_of_questions`), unless --map pairs the
    cell with another method or model. `base` and `new` are the numbers of the question with the largest rise that
    counts. If no rise counts, `base` and `new` are each the largest number of any question on their side.
    """
    found = [(*values, pair.renamed) for pair in pairs for values in _of_questions(pair, place)]
    risen = [(mine, theirs) for mine, theirs, limit, renamed in found if not renamed and theirs > max(mine, limit)]
    if risen:
        base, new = max(risen, key=lambda both: both[1] - both[0])
    else:
        base, new = (_most([values[side] for values in found]) for side in (0, 1))
    return Measure(name=ENTRIES[place], base=base, new=new, more=bool(risen))


def _of_questions(pair: Pair, place: int) -> Iterator[tuple[float, float, float]]:
    """Yield (entries in base, entries in new, limit) of each question with answers in the same samples on both sides.

    The entries are `ENTRIES[place]`, the largest number over these answers. Other questions are left out, because a
    maximum over more answers may be larger.

    Entries of new up to the limit may follow from the lengths of answers, so they are no regression. The limit of the
    peak is budget + interval. The limit of the entries after an eviction is 0 for a question whose answers are equal,
    and the budget for a question whose answers differ: some methods (scope) let an answer's entries grow up to the
    budget. For a question with a share as budget but without a bound (see `ENTRIES`), both limits are 0 if its answers
    are equal, and infinite if they differ.

    Without a budget, or if the budget bounds generated entries on neither side, three rules apply:
    - The limit of the peak is infinite.
    - If new has a budget but no entries after an eviction, although base has them, new evicted nothing. The peak of new
      is then yielded in their place.
    - The limit of the entries after an eviction is 0. Some methods (duo) also evict while decoding, so that these
      entries grow with the answers; for a question whose answers differ, the limit is then infinite.
    """
    budget, interval = pair.new.key.budget, pair.new.key.interval
    bounded = budget is not None and (pair.base.bounded or pair.new.bounded)
    grows = place == AFTER and not bounded and _evicts_while_decoding(pair.new.key.method)
    for name in pair.shared:
        mine, theirs = pair.base.questions[name], pair.new.questions[name]
        if mine.answered == theirs.answered:
            base, new = (_number(question.entries[place], math.nan) for question in (mine, theirs))
            bound, differ, limit = theirs.entries[BOUND], mine.marks != theirs.marks, 0.0
            rereads = bound is None and isinstance(budget, float)
            if place == PEAK and not bounded:
                limit = math.inf
            elif not bounded and budget is not None and math.isnan(new) and not math.isnan(base):
                new = _number(theirs.entries[PEAK], math.nan)  # base evicted right after the prompt; new did not
            elif differ and (grows or rereads):
                limit = math.inf
            elif bounded and not rereads and (place == PEAK or differ):
                limit = _number(bound, math.inf) - (0 if place == PEAK else interval or 0)
            yield base, new, limit


def _evicts_while_decoding(label: str) -> bool:
    """Return whether the method with this label may evict after its prompt; True for a method that is not installed
    here, and for a press whose kvpress is not."""
    try:
        return choose.from_label(label).trigger(1).growth is not None
    except KVBenchError:
        return True


def _number(value: float | None, unknown: float) -> float:
    return unknown if value is None else float(value)


def _most(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _ratio(pairs: Sequence[Pair], name: str) -> Measure:
    """Return the measure `name` of a cell. `base` and `new` are means of the cell's figure over the seeds. The figure
    covers all answers of the cell, even if the two sides answered different questions."""
    base = [pair.base.figures.get(name, math.nan) for pair in pairs]
    new = [pair.new.figures.get(name, math.nan) for pair in pairs]
    return Measure(name=name, base=_mean([base]), new=_mean([new]))


def _counted(pairs: Sequence[Pair], name: str) -> Measure:
    """Return the measure `name` of a cell, a count per answer.

    `base` and `new` are means of this count over the questions that have answers on both sides. If no question has
    answers on both sides, `base` is the mean over all questions with answers in base, and `new` is NaN.
    """
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
    if not base:  # no question has answers on both sides
        known = [q.share(name) for pair in pairs for q in pair.base.questions.values() if q.answers]
        return Measure(name=name, base=_mean([known]) if known else math.nan, new=math.nan)
    tested = regression([*new.values()], [*base.values()], clusters=[*clusters.values()])
    return Measure(name=name, base=_mean(base.values()), new=_mean(new.values()), p=tested.p)


def _mean(values: Iterable[Sequence[float]]) -> float:
    every = [value for row in values for value in row]
    return math.fsum(every) / len(every)
