"""Find the verdict in a judge's reply, by the rules of FastChat's llm_judge.

A reply may hold several marks such as ``[[7]]`` or ``[[A]]``; `rating` and `verdict` state which mark counts. `rating`
returns the number as it is, even outside the judge's scale. A judged answer may itself hold a mark such as ``[[10]]``,
which the judge could quote; `kvbench.scoring.judge.prompts.disarm` makes such a quotation harmless.
"""

from __future__ import annotations

import re

_NUMBER = r"(\d+\.?\d*)"
_RATINGS = (re.compile(rf"\[\[{_NUMBER}\]\]"), re.compile(rf"\[{_NUMBER}\]"))
_VERDICTS = {"[[A]]": "A", "[[B]]": "B", "[[C]]": "tie"}  # searched in this order


def rating(text: str) -> float:
    """Return the rating in a judge's reply: the number in the first ``[[x]]``, else in the first ``[x]``, else -1."""
    match = next((m for pattern in _RATINGS if (m := pattern.search(text))), None)
    return float(match[1]) if match else -1.0


def verdict(text: str) -> str:
    """Return "A" if ``[[A]]`` occurs in a judge's reply, else "B" if ``[[B]]`` occurs, else "tie" if ``[[C]]`` occurs,
    else "error"."""
    return next((name for mark, name in _VERDICTS.items() if mark in text), "error")
