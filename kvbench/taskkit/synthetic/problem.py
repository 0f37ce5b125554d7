"""A synthetic problem: the prompt, its solution (the whole right output), the final answer, and the score of an output.

Prompt and solution are also stored as pieces, the texts of single tokens. Every piece of the solution has a kind, which
says what a model must do to generate the piece. The training of the built-in model weighs and reports its loss by kind,
and `kvbench.train.head_data` finds the values of facts by the kind `FACT`. Problems with the same settings (knobs) have
equally long prompts and equally long solutions, so batches need no padding.

`draft` builds problems; `walk`, `chain` and `lookup` define their questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvbench.taskkit.synthetic.vocabulary import END

# Evaluation problem i has the seed HELD_OUT + i. Recipes train on seeds below HELD_OUT. The built-in model was trained
# on random seeds of 40 bits, which hardly ever fall on one of the evaluation problems.
HELD_OUT = 10**9

FORM = "form"  # punctuation, and tokens that follow from the tokens just before them
PLAN = "plan"  # copied from the plan, the question or a register
FACT = "fact"  # looked up by name
RESULT = "result"  # computed
STEP = "step"  # a digit of `walk`: looked up and computed at once
ANSWER = "answer"  # the word " Answer" that stops the solution, and the boxed answer
KINDS = (FORM, PLAN, FACT, RESULT, STEP, ANSWER)


class Score(NamedTuple):
    """The score of an output: `exact` is 0 or 1, `partial` is from 0 to 1, `answer` is the extracted answer."""

    exact: float
    partial: float
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One synthetic problem; the generator's seed and settings (knobs) determine it."""

    prompt: str
    solution: str  # without the end token that follows it
    answer: str
    steps: tuple[str, ...]  # the parts of the solution that are scored, in order
    tail: str  # the solution after the last step
    prompt_pieces: tuple[str, ...]
    solution_pieces: tuple[str, ...]
    solution_kinds: tuple[str, ...]


def said(output: str) -> str:
    """Return a model's output up to the end token; the whole output if it holds no end token."""
    return output.split(END, 1)[0]


def right_steps(problem: Problem, text: str) -> int:
    """Return how many steps of the problem's solution `text` has before its first wrong character."""
    position = 0
    for count, step in enumerate(problem.steps):
        if not text.startswith(step, position):
            return count
        position += len(step)
    return len(problem.steps)


def boxed(text: str) -> str | None:
    """Return the content of the first ``\\boxed{...}`` in a text, without outer blanks; None if no box is closed."""
    _, _, rest = text.partition("\\boxed{")
    inside, closed, _ = rest.partition("}")
    return inside.strip() if closed else None
