"""Compares two sides and judges the new one: a verdict for every cell, and the exit code.

    outcome = compare(base, new, Policy(margin=0.02))
    outcome.judged[0].verdict, outcome.exit_code

Verdicts of a cell:
    same            all answers and their scores are equal
    differs         answers differ although everything that decides tokens is equal: the code is not deterministic
    no worse than M the lower bound of the difference is above -M
    better          with a margin of 0: the lower bound of the difference is above 0
    worse           the bound is at most -M, and the one-sided paired test rejects "no drop", after Holm's correction
                    over all cells of the tier
    undecided       the bound is at most -M, and the test does not reject; `drop`: how large a drop the test would find
    missing         new lacks something that base has: the cell, a score of a sample, or a figure with a limit
                    (in an unfinished cell, see `lost.is_unfinished`, only scores of failed samples count as missing)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.compare import lost
from kvbench.compare.cell import Key, Side
from kvbench.compare.decisions import FirstDecision, first_decision
from kvbench.compare.exact import First, first_difference, identical
from kvbench.compare.facts import same_tokens
from kvbench.compare.matching import match
from kvbench.compare.measures import Measure, measures
from kvbench.compare.policy import Policy
from kvbench.compare.stages import Group, Tested, Verdict, grouped, judge, test
from kvbench.compare.stored import Stored
from kvbench.errors import bare

PASS, MISSING, REGRESSION = 0, 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The judgement of one cell. critical: whether the cell is in the critical tier, so that the comparison fails if
    the cell fails. reasons: a clause for each reason why the cell fails; empty if it passes or is only undecided."""

    key: Key
    critical: bool
    verdict: str
    code: int  # the exit code that this cell asks for: 0, 4 or 5
    margin: float
    pairs: Group = ()  # one pair per stage; empty: the cell is missing
    tested: Tested | None = None
    p: float = math.nan  # after Holm's correction; uncorrected if the second seed was not run
    drop: float = math.nan  # the smallest true drop that the test finds with 80% power
    again: bool = False  # the first stage rejects, and the second seed was not run
    first: First | None = None
    decision: FirstDecision | str | None = None  # result of `first_decision`, if both sides have recorded decisions
    measures: tuple[Measure, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    base: Side
    new: Side
    judged: list[Judged]
    extra: list[Key]
    aside: tuple[list[Key], list[Key]]  # cells of base, and of new, that --map leaves out
    policy: Policy
    stages: int

    @property
    def undecided(self) -> list[Judged]:
        return [one for one in self.judged if one.verdict == "undecided"]

    @property
    def wanting(self) -> Mapping[str, str]:
        """The unfinished runs of the new side, with their progress, if the policy is strict; otherwise none."""
        return self.new.unfinished if self.policy.strict else {}

    def lacks_decision(self, one: Judged) -> bool:
        """Return whether a cell makes the comparison fail because the policy is strict and the cell is undecided. While
        the second seed of any cell is not run, this holds only for cells whose first stage rejects, because the exit
        code then says whether a second seed is needed."""
        undecided = self.policy.strict and one.critical and one.verdict == "undecided"
        return undecided and (one.again or not self._is_first_stage)

    @property
    def _is_first_stage(self) -> bool:
        return any(one.tested is not None and one.tested.is_pending(self.stages) for one in self.judged)

    @property
    def exit_code(self) -> int:
        codes = {one.code for one in self.judged if one.critical}
        if any(map(self.lacks_decision, self.judged)):
            codes.add(REGRESSION)
        if self.wanting:
            codes.add(MISSING)
        return max(codes, default=PASS)


def compare(
    base: Side, new: Side, policy: Policy, mapping: Mapping[str, str] | None = None, *, stages: int = 1
) -> Outcome:
    """Pair the cells of two sides and judge each cell. stages: 1, or 2 for tests on two seeds (see
    `kvbench.compare.stages`). Raises UserError."""
    matched = match(base, new, mapping)
    pairs = grouped(matched.both, stages)
    tested = {key: test(found) for key, found in pairs.items()}
    stored = Stored(base), Stored(new)
    judged = []
    for critical in (True, False):
        tier = {key: one for key, one in tested.items() if policy.critical(key) == critical}
        for key, verdict in judge(tier, policy, stages).items():
            one = _with_answers(_judged(key, pairs[key], tested[key], verdict, policy), stored, new)
            judged.append(_with_measures(one, policy, new))
    judged += [_absent(key, policy, matched.extra) for key in lost.absent(matched, new, stages)]
    return Outcome(
        base=base,
        new=new,
        judged=sorted(judged, key=lambda one: one.key.order()),
        extra=matched.extra,
        aside=matched.aside,
        policy=policy,
        stages=stages,
    )


def _absent(key: Key, policy: Policy, extra: Sequence[Key]) -> Judged:
    near = [k for k in extra if (k.task, k.name) == (key.task, key.name)]
    alike = [k for k in near if k.budget == key.budget]
    hint = f"; it has {bare(near[0].cell)}, and budgets cannot be mapped" if near else ""
    hint = f"; it has {bare(alike[0].method)}: --map compares the two" if alike else hint
    return Judged(
        key=key,
        critical=policy.critical(key),
        verdict="missing",
        code=MISSING,
        margin=policy.margin_of(key),
        reasons=(f"the new side has no such cell{hint}",),
    )


def _judged(key: Key, pairs: Group, tested: Tested, verdict: Verdict, policy: Policy) -> Judged:
    """Return the judgement of a cell with the verdict, exit code and reasons that follow from its scores alone;
    `_with_answers` and `_with_measures` may change these three."""
    worse = verdict.name == "worse"
    fell = f"the mean score fell by {-tested.together.diff:.3f} (p={verdict.p:.2g})"
    return Judged(
        key=key,
        critical=policy.critical(key),
        verdict=verdict.name,
        code=REGRESSION if worse else PASS,
        margin=policy.margin_of(key),
        pairs=pairs,
        tested=tested,
        decision=next((first_decision(one.base, one.new) for one in pairs if one.decided), None),
        p=verdict.p,
        drop=verdict.drop,
        again=verdict.again,
        measures=tuple(measures(pairs)),
        reasons=(fell,) if worse else (),
    )


def _with_answers(one: Judged, stored: tuple[Stored, Stored], new: Side) -> Judged:
    """Return the judgement, changed by what the answers show: new lacks scores, all answers and scores are equal, or
    answers differ although they must be equal."""
    if count := lost.of_pairs(one.pairs, new):
        samples = "1 sample has" if count == 1 else f"{count} samples have"
        one = _missing(one, f"{samples} a score in base but none in new")
    elif one.verdict != "worse" and all(map(identical, one.pairs)):
        return replace(one, verdict="same")
    found = [(pair, first_difference(pair, stored[0].output, stored[1].output)) for pair in one.pairs]
    exact = [first for pair, first in found if first and not pair.renamed and same_tokens(pair.base, pair.new)]
    if exact:
        reason = f"answers differ though all that decides tokens is equal; the first is {exact[0].words}"
        return replace(one, verdict="differs", code=REGRESSION, first=exact[0], reasons=(*one.reasons, reason))
    return replace(one, first=next((first for _, first in found if first), None))


def _missing(one: Judged, reason: str) -> Judged:
    return replace(one, verdict="missing", code=max(one.code, MISSING), reasons=(*one.reasons, reason))


def _with_measures(one: Judged, policy: Policy, new: Side) -> Judged:
    """Return the judgement, changed by what the measures show. If a number of entries rose or a figure is beyond the
    policy's limit, the exit code becomes that of a regression, whatever the verdict. If a figure with a limit is known
    in base and unknown in new, the verdict becomes "missing", unless the cell is unfinished in new."""
    limited = [m for m in one.measures if m.name in policy.limits]
    unknown = [m.words for m in limited if m.lost]
    if unknown and not any(lost.is_unfinished(pair, new) for pair in one.pairs):
        one = _missing(one, f"{', '.join(unknown)}: limited by the policy, and known in base but not in new")
    reasons = [f"{m.words}: {m.base:g} before, {m.new:g} now" for m in one.measures if m.more]
    for m in limited:
        if m.beyond(policy.limits[m.name]):
            limit = policy.limits[m.name]
            reasons.append(f"{m.words}: {m.base:.4g} before, {m.new:.4g} now, beyond the limit {limit:g}")
    return replace(one, code=REGRESSION, reasons=(*one.reasons, *reasons)) if reasons else one
