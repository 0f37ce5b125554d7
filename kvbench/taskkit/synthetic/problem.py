"""A synthetic problem: the prompt, the trace that solves it, the answer, and the score of an output.

Texts come with their pieces, one token each; every piece of the trace has a kind, which says what a model must do to
write it. Training weighs and reports its loss by kind, nothing else looks at it. Problems with the same knobs have the
same prompt length and the same trace length, so batches need no padding.

How problems are put together is in `draft`; what they ask is in `walk`, `chain` and `lookup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvbench.taskkit.synthetic.vocabulary import END

HELD_OUT = 10**9  # evaluation problem i has the seed HELD_OUT + i; training draws its seeds at random from 40 bits

FORM = "form"  # punctuation, and whatever the tokens just before settle
PLAN = "plan"  # copied from elsewhere: the plan, the question, a register
FACT = "fact"  # looked up by name
RESULT = "result"  # computed
STEP = "step"  # a digit of `walk`: looked up and computed at once
ANSWER = "answer"  # the stop and the boxed answer
KINDS = (FORM, PLAN, FACT, RESULT, STEP, ANSWER)


class Score(NamedTuple):
    """`exact` is 0 or 1; `partial`, from 0 to 1, still moves where `exact` is 0; `answer` is what was extracted."""

    exact: float
    partial: float
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem; a pure function of its generator's seed and knobs."""

    prompt: str
    trace: str  # without the end token that follows it
    answer: str
    steps: tuple[str, ...]  # the scored units of the trace, in order
    tail: str  # the trace behind the last step
    prompt_pieces: tuple[str, ...]
    trace_pieces: tuple[str, ...]
    trace_kinds: tuple[str, ...]


def said(output: str) -> str:
    """The output up to the end token, should the decoder have kept it."""
    return output.split(END, 1)[0]


def right_steps(problem: Problem, text: str) -> int:
    """How many steps stand in `text` word for word before the first error."""
    position = 0
    for count, step in enumerate(problem.steps):
        if not text.startswith(step, position):
            return count
        position += len(step)
    return len(problem.steps)


def boxed(text: str) -> str | None:
    """What stands in the first closed box, without the blank that goes with a tens digit."""
    _, _, rest = text.partition("\\boxed{")
    inside, closed, _ = rest.partition("}")
    return inside.strip() if closed else None
