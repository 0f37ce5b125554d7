"""Find the letter that an output chooses, by the rule of kvbench, simple-evals or LongBench v2.

Every function returns None if the output chooses no letter.
"""

from __future__ import annotations

import re

from kvbench.scoring.boxed import after_thinking

_LINE = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")  # simple-evals' ANSWER_PATTERN_MULTICHOICE
_BOX = re.compile(r"\\boxed\{\s*(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*)?\(?\s*([A-D])\s*[}).:]")


def letter_last(text: str, thinking: bool | None = None) -> str | None:
    """Return the letter of the last "Answer: X" or ``\\boxed{X}`` after the thinking block, as a capital.

    A box may hold ``\\text{X}``, ``(X)``, or the option's text after ``X.``, ``X:`` or ``X)``; in a box X is a capital.
    """
    answer = after_thinking(text, thinking)
    choices = [(m.start(), m[1].upper()) for pattern in (_LINE, _BOX) for m in pattern.finditer(answer)]
    return max(choices)[1] if choices else None


def simple_evals(text: str) -> str | None:
    """Return the letter of the output's first "Answer: X" as written; simple-evals counts a small letter as wrong."""
    match = _LINE.search(text)
    return match[1] if match else None


def longbench_v2(text: str) -> str | None:
    """Return the letter of the first "The correct answer is (X)", else of the first "The correct answer is X". Ignores
    asterisks. Equal to `pred.py: extract_answer` of THUDM/LongBench, so "The correct answer is Berlin" gives B."""
    plain = text.replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return match[1] if match else None
