"""Judges answers to mathematics questions while a model is trained.

    right = judge("\\frac{1}{2}")
    right("... so it is \\boxed{0.5}.")        # True

math-verify compares the answers, as in the mathematics tasks, in one process that runs until the training ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kvbench.scoring.pool import ScorePool
from kvbench.task import Doc, Output
from kvbench.taskkit.math_task import MathTask


def judge(answer: str) -> Callable[[str], bool]:
    """Return a judge that compares texts with a reference (LaTeX or a number); a timeout counts as wrong."""
    doc = Doc(doc_id="", turns=(), reference=answer)

    def right(text: str) -> bool:
        output = Output(text=text, stop_reason="", prompt_tokens=0, output_tokens=0)
        return bool(_pool().submit(MathTask(), doc, output).result().value)

    return right


@cache
def _pool() -> ScorePool:
    return ScorePool()
