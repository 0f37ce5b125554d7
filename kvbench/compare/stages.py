"""Tests and judges the scores of all cells of a tier, in one stage or in two. The second stage is the same comparison
on runs with another seed.

    pairs = grouped(matched.both, stages=2)
    tested = {key: test(found) for key, found in pairs.items()}
    judge(tested, policy, stages=2)

With two stages, each seed has its own test at the level sqrt(5%), and a cell is worse only if both tests reject "no
drop". A false alarm of the first stage seldom occurs again in the second stage; a true drop does. `stats.both` combines
the p-values of both tests into one, so that Holm's correction applies as with one stage. A cell whose second seed was
not run is never worse: even if its first stage rejects, it is undecided (or no worse than the margin).

If the second seed repeats the first seed's answers, as with greedy decoding, its test says nothing new: two equal tests
at sqrt(5%) would alarm in 22% of clean changes. Such a cell has one stage, at 5%, with or without a second seed. A
method that draws entries at random, such as `random`, gives other answers with another seed, even with greedy decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType

from kvbench.compare.cell import Cell, Key, Question
from kvbench.compare.matching import Pair
from kvbench.compare.policy import Policy
from kvbench.errors import KVBenchError, UserError, bare
from kvbench.eviction import choose
from kvbench.eviction.combined import Combined
from kvbench.report.stats import ALPHA, Regression, both, holm, regression

Group = tuple[Pair, ...]  # a cell on both sides, for each seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The tests of one cell.

    stages: one test per seed. together: a test on the samples of all seeds; tables show its difference and lower bound.
    repeats: whether another seed only repeats the first seed's answers; only the first seed is then tested.
    """

    stages: tuple[Regression, ...]
    together: Regression
    repeats: bool

    def is_pending(self, stages: int) -> bool:
        """Return whether the test on a second seed is still to come. stages: the number of stages of the comparison."""
        return len(self.stages) < stages and not self.repeats

    @property
    def p(self) -> float:
        """The p-value before Holm's correction; if two seeds were run, the combined p-value of both tests
        (`stats.both`)."""
        return self.stages[0].p if len(self.stages) == 1 else both(self.stages[0].p, self.stages[1].p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one cell.

    Attributes:
        name: worse, no worse, better or undecided.
        p: the p-value after Holm's correction; with two stages but without the second seed, the uncorrected p-value of
            the first stage.
        drop: the smallest true drop of the mean score that the test finds with 80% power.
        again: whether the user must run the second seed: it was not run, the cell is undecided, and the test of the
            first stage rejects "no drop". Always False with one stage.
    """

    name: str
    p: float
    drop: float
    again: bool


def grouped(pairs: Sequence[Pair], stages: int) -> dict[Key, Group]:
    """Return the pairs of each cell, in a dictionary by the key of the cell's first pair.

    With one stage, every pair is a cell: cells with different seeds are different cells. With two stages, the pairs
    that differ only in their seed are one cell. Raises UserError if a cell has more seeds than stages.
    """
    if stages == 1:
        return {pair.key: (pair,) for pair in pairs}
    by_cell: dict[Key, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.key.order()):
        by_cell.setdefault(replace(pair.key, seed=""), []).append(pair)
    for found in by_cell.values():
        if len(found) > stages:
            seeds = bare(", ".join(pair.key.seed for pair in found))
            raise UserError(
                f"--two-stage takes two seeds; {bare(found[0].key.cell)} has seeds {seeds}. Name fewer runs."
            )
    return {found[0].key: tuple(found) for found in by_cell.values()}


def test(pairs: Group) -> Tested:
    repeats = any(map(_repeats, ([pair.base for pair in pairs], [pair.new for pair in pairs])))
    used = pairs[:1] if repeats else pairs
    stages = tuple(_regression((pair,)) for pair in used)
    return Tested(stages=stages, together=stages[0] if len(stages) == 1 else _regression(used), repeats=repeats)


def _repeats(cells: Sequence[Cell]) -> bool:
    """Return whether seeds repeat answers on one side. cells: one per seed. Two seeds repeat answers if their answers
    are equal. With one seed, another seed will repeat its answers if decoding is greedy and the method draws nothing.
    """
    if len(cells) > 1:
        return len({cell.digest for cell in cells}) < len(cells)
    return cells[0].facts.get("temperature") in ("0", "0.0") and not _may_draw(cells[0].key.method)


def _may_draw(label: str) -> bool:
    """Return whether the method with this label may draw random numbers; True for a method that is not installed here,
    and for a press, whose code is kvpress's. Methods take random numbers from `LayerView.noise`, so a method counts as
    drawing if its class names `noise`, even if an option turns the draws off."""
    try:
        method = choose.from_label(label)
    except KVBenchError:
        return True
    parts = [method.first, method.second] if isinstance(method, Combined) else [method]
    for part in parts:
        if inner := getattr(part, "inner", None):  # of a wrapper; it may be a wrapper, too
            parts.append(inner)
    return any(part.kind in ("noise", "press") or _names_noise(type(part)) for part in parts)


def _names_noise(cls: type) -> bool:
    functions = (value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, FunctionType))
    return any("noise" in function.__code__.co_names for function in functions)


def judge(tested: Mapping[Key, Tested], policy: Policy, stages: int) -> dict[Key, Verdict]:
    """Return the verdicts on all cells of a tier. The cells are one family for Holm's correction."""
    pending = {key for key, one in tested.items() if one.is_pending(stages)}
    adjusted = holm([1.0 if key in pending else one.p for key, one in tested.items()])
    hoped = holm([one.p**stages if key in pending else one.p for key, one in tested.items()])
    judged = {}
    for (key, one), p, least in zip(tested.items(), adjusted, hoped):
        name = _verdict(one.together, p, policy.margin_of(key))
        judged[key] = Verdict(
            name=name,
            p=one.p if key in pending else p,
            drop=one.stages[0].drop(ALPHA / len(tested), stages=1 if one.repeats else stages),
            again=name == "undecided" and key in pending and least <= ALPHA,
        )
    return judged


def _verdict(found: Regression, p: float, margin: float) -> str:
    """Return the name of a verdict. If the lower bound of the difference is above -margin, it is "better" with a margin
    of 0 and "no worse" with another margin, whatever p is. Otherwise it is "worse" if p is at most ALPHA, and
    "undecided" if p is larger."""
    if not math.isnan(found.low) and found.low > -margin:
        return "better" if margin == 0 else "no worse"
    return "worse" if p <= ALPHA else "undecided"


def _regression(pairs: Group) -> Regression:
    """Return one test on the samples of all `pairs` together. Only samples that have a score on both sides count."""
    base, new, clusters = [], [], []
    for name in sorted({name for pair in pairs for name in pair.shared}):
        have = [(pair.base.questions[name], pair.new.questions[name]) for pair in pairs if name in pair.shared]
        samples = [scores for mine, theirs in have for scores in _shared(mine, theirs)]
        if samples:
            base.append([a for a, _ in samples])
            new.append([b for _, b in samples])
            clusters.append(have[0][0].cluster)
    return regression(base, new, clusters=clusters)


def _shared(base: Question, new: Question) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(base.scores, new.scores) if a is not None and b is not None]
