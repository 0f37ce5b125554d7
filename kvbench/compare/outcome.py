"""The judgement of two sides: a verdict for every cell, and the exit code.

    outcome = compare(base, new, Policy(margin=0.02))
    outcome.judged[0].verdict, outcome.exit_code

Verdicts of a cell:
    same            all answers are equal
    differs         all that decides tokens is equal, but answers are not: the code does not repeat itself
    no worse than M the lower bound of the difference is above -M
    worse           the one-sided paired test rejects "no drop", after Holm over the cells of a tier
    undecided       neither; `drop` says what could have been seen
    better          undecided about M = 0, with a higher mean whose lower bound is above 0
    missing         the cell, or a sample that base has a score for, has no score in new
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.compare.cell import Key, Question, Side
from kvbench.compare.decisions import FirstDecision, first_decision
from kvbench.compare.exact import First, first_difference, identical
from kvbench.compare.facts import same_tokens
from kvbench.compare.matching import Pair, match
from kvbench.compare.measures import Measure, measures
from kvbench.compare.policy import Policy
from kvbench.compare.stages import Tested, Verdict, grouped, judge, test
from kvbench.compare.stored import Stored
from kvbench.errors import bare

PASS, MISSING, REGRESSION = 0, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The judgement of one cell. reasons: why it fails, one sentence each; empty: it passes."""

    key: Key
    critical: bool
    verdict: str
    code: int  # of this cell: 0, 4 or 5
    margin: float
    pair: Pair | None = None  # None: the cell is missing
    tested: Tested | None = None
    p: float = math.nan  # after Holm
    drop: float = math.nan  # the true drop that is found with 80% power
    again: bool = False  # the first stage rejects, and the second seed was not run
    first: First | None = None
    decision: FirstDecision | str | None = None  # with recorded decisions on both sides
    measures: tuple[Measure, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    base: Side
    new: Side
    judged: list[Judged]
    extra: list[Key]
    policy: Policy
    stages: int

    @property
    def undecided(self) -> list[Judged]:
        return [one for one in self.judged if one.verdict == "undecided"]

    @property
    def exit_code(self) -> int:
        codes = {one.code for one in self.judged if one.critical}
        if self.policy.strict and any(one.critical for one in self.undecided):
            codes.add(REGRESSION)
        if self.policy.strict and self.new.unfinished:
            codes.add(MISSING)
        return max(codes, default=PASS)


def compare(
    base: Side, new: Side, policy: Policy, mapping: Mapping[str, str] | None = None, *, stages: int = 1
) -> Outcome:
    """Match and judge. stages: 2 waits for a second seed where the first one rejects. Raises UserError."""
    matched = match(base, new, mapping)
    pairs = grouped(matched.both, stages)
    missing = [key for key in matched.missing if not (stages > 1 and _other_seed(key, pairs))]
    tested = {key: test(found) for key, found in pairs.items()}
    stored = Stored(base), Stored(new)
    judged = []
    for critical in (True, False):
        tier = {key: one for key, one in tested.items() if policy.critical(key) == critical}
        for key, verdict in judge(tier, policy, stages).items():
            one = _judged(key, pairs[key][0], tested[key], verdict, policy)
            judged.append(_with_measures(_with_answers(one, stored, new), policy))
    judged += [_absent(key, policy, matched.extra) for key in missing]
    return Outcome(
        base=base,
        new=new,
        judged=sorted(judged, key=lambda one: one.key.order()),
        extra=matched.extra,
        policy=policy,
        stages=stages,
    )


def _other_seed(key: Key, pairs: Mapping[Key, Sequence[Pair]]) -> bool:
    """Whether a cell is the second stage of a cell that is there."""
    return any(replace(key, seed=other.seed) == other for other in pairs)


def _absent(key: Key, policy: Policy, extra: Sequence[Key]) -> Judged:
    near = [k for k in extra if (k.task, k.budget, k.name) == (key.task, key.budget, key.name)]
    hint = f"; it has {bare(near[0].method)}: --map compares the two" if near else ""
    return Judged(
        key=key,
        critical=policy.critical(key),
        verdict="missing",
        code=MISSING,
        margin=policy.margin_of(key),
        reasons=(f"the new side has no such cell{hint}",),
    )


def _judged(key: Key, pair: Pair, tested: Tested, verdict: Verdict, policy: Policy) -> Judged:
    """The judgement of scores alone."""
    worse = verdict.name == "worse"
    fell = f"the mean score fell by {-tested.together.diff:.3f} (p={verdict.p:.2g})"
    return Judged(
        key=key,
        critical=policy.critical(key),
        verdict=verdict.name,
        code=REGRESSION if worse else PASS,
        margin=policy.margin_of(key),
        pair=pair,
        tested=tested,
        decision=first_decision(pair.base, pair.new) if pair.base.decisions and pair.new.decisions else None,
        p=verdict.p,
        drop=verdict.drop,
        again=verdict.again,
        measures=tuple(measures(pair)),
        reasons=(fell,) if worse else (),
    )


def _with_answers(one: Judged, stored: tuple[Stored, Stored], new: Side) -> Judged:
    """Adds what the answers themselves say: the same, differing where they may not, or without a score."""
    pair = one.pair
    assert pair is not None
    lost = sum(_lost(pair.base.questions[q], pair.new.questions[q]) for q in pair.shared)
    if lost and not new.unfinished:
        reason = f"{'1 sample has' if lost == 1 else f'{lost} samples have'} no score, but one in the base"
        one = replace(one, verdict="missing", code=max(one.code, MISSING), reasons=(*one.reasons, reason))
    if identical(pair):
        return replace(one, verdict="same" if one.verdict != "worse" else "worse")
    if not pair.mapped and same_tokens(pair.base, pair.new):
        first = first_difference(pair, stored[0].output, stored[1].output)
        where = f"; the first is {first.words}" if first else ""
        reason = f"answers differ though all that decides tokens is equal{where}"
        return replace(one, verdict="differs", code=REGRESSION, first=first, reasons=(*one.reasons, reason))
    return replace(one, first=first_difference(pair, stored[0].output, stored[1].output))


def _lost(base: Question, new: Question) -> int:
    """Samples with a score in base and, though they were run, none in new."""
    return sum(a is not None and b is None for a, b in zip(base.scores, new.scores))


def _with_measures(one: Judged, policy: Policy) -> Judged:
    """Adds entries that rose, and figures beyond a limit of the policy."""
    reasons = [f"{m.words}: {m.base:g} before, {m.new:g} now" for m in one.measures if m.more]
    for m in one.measures:
        if m.name in policy.limits and m.beyond(policy.limits[m.name]):
            reasons.append(
                f"{m.words}: {m.base:.4g} before, {m.new:.4g} now, beyond the limit {policy.limits[m.name]:g}"
            )
    if not reasons:
        return one
    return replace(one, code=REGRESSION, reasons=(*one.reasons, *reasons))


def describe(one: Judged) -> str:
    """The cell with its failures in one line."""
    return f"{bare(one.key.cell)}: {'; '.join(one.reasons)}"
