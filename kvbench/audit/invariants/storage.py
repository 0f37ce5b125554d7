"""The invariant `storage`: a method's results depend neither on the order of stored entries nor on invalid entries, and
its scores do not depend on the other sequences of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.audit.invariants.exam import AuditLayout, Exam
from kvbench.audit.invariants.generation import evicts
from kvbench.audit.invariants.scramble import by_position, largest_change, mapped, scrambled
from kvbench.audit.outcome import Broken, NotApplicable
from kvbench.eviction.api import Method, ScoreOut
from kvbench.eviction.select import competing, decide
from kvbench.eviction.view import LayerView

CLOSE = 1e-4  # relative; sums in another order differ in their last bits
WAYS: dict[str, float | None] = {
    "when entries are stored in another order": None,
    "when invalid entries hold NaN": float("nan"),
    "when invalid entries hold 1e4": 1e4,
}


@torch.inference_mode()
def storage(exam: Exam, layout: AuditLayout) -> None:
    """Scores do not depend on storage order, on invalid entries, or on other sequences of the batch."""
    seen = exam.main(layout).seen
    evicts(exam)
    if not seen.decisions:
        raise NotApplicable("the engine never called the method to evict in sequences this short")
    for acting, views in seen.decisions:
        for how, junk in WAYS.items():
            _decides_alike(acting, views, [scrambled(v, 7, junk) for v in views], how)
        for row in range(len(views[0].seen)):
            alone = [mapped(v, lambda tensor, row=row: tensor[[row]]) for v in views]  # type: ignore[misc]
            _scores_alike(acting, alone, views, row)
    for acting, view in seen.observations:
        for how, junk in WAYS.items():
            _observes_alike(acting, view, scrambled(view, 7, junk), how)


def _decides_alike(method: Method, plain: Sequence[LayerView], other: Sequence[LayerView], how: str) -> None:
    """Compare a method's scores, columns and decisions for the same entries, stored as in `plain` and as in `other`.
    how: how `other` differs, in words for the message. Raises Broken if results differ by more than rounding."""
    for a, b in zip(plain, other):
        free = by_position(competing(method, a), a) > 0
        mine, theirs = _scored(method, a), _scored(method, b)
        change = largest_change(by_position(mine.score, a)[free], by_position(theirs.score, b)[free])
        if change > CLOSE:
            raise Broken(f"in layer {a.layer} scores change by {change:.1e} (relative) {how}{_cure(how)}")
        for name in mine.columns:
            _alike(name, mine.columns[name], theirs.columns[name], a, b, how)
    ties = None
    for a, b, mine_, theirs_ in zip(plain, other, decide(method, plain), decide(method, other)):
        kept, others = by_position(mine_.keep, a) > 0, by_position(theirs_.keep, b) > 0
        if bool((kept == others).all()):
            continue
        if ties is None:
            ties = torch.cat([by_position(_scored(method, v).score, v)[by_position(v.valid, v) > 0] for v in plain])
        swapped = by_position(_scored(method, a).score, a)[kept != others]
        spread = float(swapped.max() - swapped.min())
        if not spread <= CLOSE * float(ties[torch.isfinite(ties)].abs().max().clamp_min(1e-30)):
            count = int((kept != others).sum())
            raise Broken(f"in layer {a.layer}, {count} entries are kept or evicted differently {how}{_cure(how)}")


def _cure(how: str) -> str:
    return "; use `view.valid` to leave invalid entries out" if WAYS[how] is not None else ""


def _scores_alike(method: Method, alone: Sequence[LayerView], together: Sequence[LayerView], row: int) -> None:
    for a, b in zip(alone, together):
        mine, theirs = _scored(method, a).score[0], _scored(method, b).score[row]
        valid = a.valid[0]
        if not torch.equal(mine[valid], theirs[valid]):
            change = float((mine[valid] - theirs[valid]).abs().nan_to_num().max())
            raise Broken(
                f"in layer {a.layer} scores change by {change:.1e} when the sequence is scored without the rest of its "
                "batch"
            )


def _observes_alike(method: Method, plain: LayerView, other: LayerView, how: str) -> None:
    mine, theirs = method.observe(plain), method.observe(other)
    for name in mine:
        _alike(name, mine[name], theirs[name], plain, other, how)


def _alike(name: str, a: torch.Tensor, b: torch.Tensor, mine: LayerView, theirs: LayerView, how: str) -> None:
    """Compare the values `a` and `b` of one column or state, which the method returned for the same entries.

    The entries are stored as in `mine` and as in `theirs`. how: how `theirs` is stored, in words for the message.
    Raises Broken if the values differ by more than rounding.
    """
    if name in mine.columns:
        a, b = by_position(a, mine), by_position(b, theirs)
    change = largest_change(a.double(), b.double())
    if change > CLOSE:
        kind = "column" if name in mine.columns else "state"
        raise Broken(f"in layer {mine.layer} {kind} {name!r} changes by {change:.1e} (relative) {how}{_cure(how)}")


def _scored(method: Method, view: LayerView) -> ScoreOut:
    return ScoreOut.of(method.score(view))
