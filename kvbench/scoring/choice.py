"""The letter that an output chooses, by rules that differ in what they accept.

    letter_last(text, thinking)      # GPQA, primary: the last choice behind the thinking block
    simple_evals(text)               # GPQA as simple-evals reads it: the first "Answer: X" anywhere
    longbench_v2(text)               # LongBench v2: "The correct answer is (X)"

None: no choice was found.
"""

from __future__ import annotations

import re

from kvbench.scoring.boxed import after_thinking

_LINE = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")  # simple-evals' ANSWER_PATTERN_MULTICHOICE
_BOX = re.compile(r"\\boxed\{\s*(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*)?\(?\s*([A-D])\s*[}).:]")


def letter_last(text: str, thinking: bool | None = None) -> str | None:
    """The last "Answer: X" or ``\\boxed{X}`` of the answer part, as a capital letter.

    A box may hold ``\\text{X}``, ``(X)`` or the option's text behind its letter.
    """
    answer = after_thinking(text, thinking)
    found = [(m.start(), m[1].upper()) for pattern in (_LINE, _BOX) for m in pattern.finditer(answer)]
    return max(found)[1] if found else None


def simple_evals(text: str) -> str | None:
    """The first "Answer: X" of the whole output, its letter as written; a small one is wrong there."""
    found = _LINE.search(text)
    return found[1] if found else None


def longbench_v2(text: str) -> str | None:
    """The letter of the first "The correct answer is (X)", else of the first without brackets; asterisks do not matter.

    Equal to `pred.py: extract_answer` of THUDM/LongBench, so "The correct answer is Berlin" says B.
    """
    plain = text.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return found[1] if found else None
