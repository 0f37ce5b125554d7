"""The verdict in a judge's reply, by the rules of FastChat's llm_judge.

    rating("Good. Rating: [[7.5]]")      # 7.5; -1 without one
    verdict("Final: [[A]]")              # "A", "B", "tie", or "error" without one

The first match counts and nothing is clipped, so that numbers compare with published ones. An answer may hold a
verdict that the judge then quotes; `kvbench.scoring.judge.prompts.disarm` prevents that.
"""

from __future__ import annotations

import re

_NUMBER = r"(\d+\.?\d*)"
_RATINGS = (re.compile(rf"\[\[{_NUMBER}\]\]"), re.compile(rf"\[{_NUMBER}\]"))
INVALID = -1.0
VERDICTS = {"[[A]]": "A", "[[B]]": "B", "[[C]]": "tie"}  # searched in this order
NO_VERDICT = "error"


def rating(text: str) -> float:
    """The first ``[[x]]``, else the first ``[x]``, else -1."""
    match = next((m for pattern in _RATINGS if (m := pattern.search(text))), None)
    return float(match[1]) if match else INVALID


def verdict(text: str) -> str:
    """By the first of ``[[A]]``, ``[[B]]``, ``[[C]]`` that occurs anywhere: "A", "B", "tie", else "error"."""
    return next((name for mark, name in VERDICTS.items() if mark in text), NO_VERDICT)
