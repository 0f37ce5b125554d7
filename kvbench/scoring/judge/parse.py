"""The verdict in a judge's reply, by the rules of FastChat's llm_judge.

    rating("Good. Rating: [[7.5]]")      # 7.5; -1 without one
    verdict("Final: [[A]]")              # "A", "B", "tie", or "error" without one

The first match counts and nothing is clipped: these numbers compare with published ones. Both read the judge's text
alone; `kvbench.scoring.judge.prompts.disarm` keeps a judge that quotes an answer from repeating a verdict that stands
in it.
"""

from __future__ import annotations

import re

_NUMBER = r"(\d+\.?\d*)"
_RATINGS = (re.compile(rf"\[\[{_NUMBER}\]\]"), re.compile(rf"\[{_NUMBER}\]"))
INVALID = -1.0
VERDICTS = {"[[A]]": "A", "[[B]]": "B", "[[C]]": "tie"}  # looked for in this order
NO_VERDICT = "error"


def rating(text: str) -> float:
    """The first ``[[x]]``, else the first ``[x]``, else -1."""
    found = next((m for pattern in _RATINGS if (m := pattern.search(text))), None)
    return float(found[1]) if found else INVALID


def verdict(text: str) -> str:
    """By the first of ``[[A]]``, ``[[B]]``, ``[[C]]`` that occurs anywhere: "A", "B", "tie", else "error"."""
    return next((said for mark, said in VERDICTS.items() if mark in text), NO_VERDICT)
