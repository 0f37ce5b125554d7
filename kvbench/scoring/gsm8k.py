"""The two answer filters of lm-eval's task gsm8k (version 3), which most published GSM8K numbers use.

They compare text, so both reject "18.0" for "18". kvbench's headline score uses math-verify instead.
"""

from __future__ import annotations

import re

_STRICT = re.compile(r"#### (-?[0-9.,]+)")  # first match
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")  # last match
_IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")  # removed in this order from answer and reference


def lm_eval_filters(text: str, answer: str) -> dict[str, float]:
    """Return 1.0 or 0.0 per filter: whether the number that the filter finds in an output equals the reference
    `answer`."""
    strict = _STRICT.search(text)
    flexible = list(_FLEXIBLE.finditer(text))
    answers = {"lm_eval_strict": strict and strict[1], "lm_eval_flexible": flexible[-1][0] if flexible else None}
    gold = _plain(answer)
    return {name: float(value is not None and _plain(value) == gold) for name, value in answers.items()}


def _plain(text: str) -> str:
    for pattern in _IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower().strip()
