"""A synthetic problem: the prompt, its trace (the whole right output), the final answer, and the score of an output.

Each text is also stored as pieces of one token each. Every piece of the trace has a kind, which says what a model must
do to generate the piece; only training uses kinds, to weigh and report its loss. Problems with the same knobs have the
same prompt length and the same trace length, so batches need no padding.

`draft` builds problems; `walk`, `chain` and `lookup` define what they ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvbench.taskkit.synthetic.vocabulary import END

HELD_OUT = 10**9  # evaluation problem i has the seed HELD_OUT + i; training draws its seeds at random from 40 bits

FORM = "form"  # punctuation, and tokens that follow from the tokens just before them
PLAN = "plan"  # copied from elsewhere: the plan, the question, a register
FACT = "fact"  # looked up by name
RESULT = "result"  # computed
STEP = "step"  # a digit of `walk`: looked up and computed at once
ANSWER = "answer"  # the word " Answer" that stops the trace, and the boxed answer
KINDS = (FORM, PLAN, FACT, RESULT, STEP, ANSWER)


class Score(NamedTuple):
    """The score of an output: `exact` is 0 or 1, `partial` is from 0 to 1, `answer` is the extracted answer."""

    exact: float
    partial: float
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem; the generator's seed and knobs determine it."""

    prompt: str
    trace: str  # without the end token that follows it
    answer: str
    steps: tuple[str, ...]  # the scored units of the trace, in order
    tail: str  # the trace after the last step
    prompt_pieces: tuple[str, ...]
    trace_pieces: tuple[str, ...]
    trace_kinds: tuple[str, ...]


def said(output: str) -> str:
    """Return the output up to the end token, or all of it if it holds none."""
    return output.split(END, 1)[0]


def right_steps(problem: Problem, text: str) -> int:
    """Return how many of the problem's steps `text` gets right before its first error, character for character."""
    position = 0
    for count, step in enumerate(problem.steps):
        if not text.startswith(step, position):
            return count
        position += len(step)
    return len(problem.steps)


def boxed(text: str) -> str | None:
    """Return the content of the first ``\\boxed{...}`` without outer blanks; None without a closed box."""
    _, _, rest = text.partition("\\boxed{")
    inside, closed, _ = rest.partition("}")
    return inside.strip() if closed else None
