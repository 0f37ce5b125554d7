"""Score a conversation by a judge: the judge rates each answer, or sees it beside a baseline's answer to the same
turn, in both orders, and says which is better.

A score is the mean over the turns that have a verdict; it has no value if no turn has one. After a reply without a
verdict the judge gets the same request once more; after a second such reply the turn has no verdict. Aux `invalid`
counts all replies without a verdict. A rating outside 1 to 10 is no verdict. (FastChat accepts such a rating, although
its prompt limits the scale to 1 to 10.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvbench.scoring.judge import parse, prompts
from kvbench.scoring.judge.api import Judge
from kvbench.scoring.judge.asking import Asked, ask, failed, judged, judged_by
from kvbench.scoring.judge.prompts import Answers
from kvbench.task import Doc, Score

LOWEST, HIGHEST = 1.0, 10.0
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "loss"}


@judged
def rate(judge: Judge, doc: Doc, answers: Answers) -> Score:
    """Return the judge's ratings of a conversation: value = mean rating / 10, aux `rating_1`, ... = each turn's rating.
    A turn without a rating has no aux value. `judged` makes the caller pass a run's `Services` in place of `judge`."""
    asked = [ask(judge, prompts.single(doc, answers, turn), _rating) for turn in range(len(doc.turns))]
    return _score(asked, "rating", scale=HIGHEST, label="{:g}".format, mode="single")


@judged
def compare(judge: Judge, doc: Doc, answers: Answers, baseline: Answers) -> Score:
    """Let the judge compare each turn's answer with the baseline's; return the mean outcome: win 1, tie 0.5, loss 0.

    The judge sees both answers in both orders (FastChat's pairwise-baseline). Different verdicts in the two orders are
    a tie; if one order has no verdict, the turn has none. If the answers to a turn and to all earlier turns equal the
    baseline's, the turn is a tie without a request. Aux `outcome_1`, ... has the outcome of each turn with a verdict.
    """
    asked = [_both_orders(judge, doc, answers, baseline, turn) for turn in range(len(doc.turns))]
    return _score(asked, "outcome", scale=1.0, label=OUTCOMES.__getitem__, mode="pair")


def _rating(text: str) -> float | None:
    rating = parse.rating(text)
    return rating if LOWEST <= rating <= HIGHEST else None


def _both_orders(judge: Judge, doc: Doc, answers: Answers, baseline: Answers, turn: int) -> Asked[float]:
    if list(answers[: turn + 1]) == list(baseline[: turn + 1]):
        return Asked(0.5, 0, "")
    first = ask(judge, prompts.pair(doc, answers, baseline, turn), _preferred("A"))
    second = ask(judge, prompts.pair(doc, baseline, answers, turn), _preferred("B"))
    value = None
    if first.value is not None and second.value is not None:
        value = first.value if first.value == second.value else 0.5
    return Asked(value, first.invalid + second.invalid, second.judge)


def _preferred(ours: Literal["A", "B"]) -> Callable[[str], float | None]:
    """Return a function that turns a judge's reply into our outcome: 1 (win), 0.5 (tie) or 0 (loss).

    For a reply without a verdict, the function returns None. ours: the letter under which the judge saw our
    answer, not the baseline's.
    """
    outcomes = {"A": float(ours == "A"), "B": float(ours == "B"), "tie": 0.5}
    return lambda text: outcomes.get(parse.verdict(text))


def _score(asked: list[Asked[float]], name: str, *, scale: float, label: Callable[[float], str], mode: str) -> Score:
    values = [a.value for a in asked if a.value is not None]
    judge = next((a.judge for a in reversed(asked) if a.judge), "nobody")
    if not values:
        return failed("the judge's replies hold no verdict")
    aux = {f"{name}_{turn}": a.value for turn, a in enumerate(asked, 1) if a.value is not None}
    return Score(
        value=sum(values) / len(values) / scale,
        extracted=", ".join("-" if a.value is None else label(a.value) for a in asked),
        aux={**aux, "invalid": float(sum(a.invalid for a in asked))},
        facts=judged_by(judge, mode),
        note="" if len(values) == len(asked) else "the judge's replies hold no verdict on some turns",
    )
