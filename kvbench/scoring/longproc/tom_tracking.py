"""Score a trace of beliefs: its list items must equal the list items of the reference; case, punctuation and the
words in `_FILLERS`, such as "the", "in" and "believes", are ignored."""

from __future__ import annotations

import re
import string

from kvbench.scoring.longproc.tags import result

_FILLERS = re.compile(
    r"\b(a|an|the|on|in|at|the|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + "’")


def score_trace(text: str, reference: str) -> dict[str, float]:
    """Score the list items of an output (lines that begin with a hyphen), as LongProc's `eval_tom_tracking` does.

    As there, indented items are ignored unless the first item is indented, and extraction_rate is always 1. reference:
    the right trace. The partial score is the share of the right trace's items that the output repeats before its first
    wrong one.
    """
    steps, wanted = _steps(text), _steps(reference)
    if steps == wanted:
        return result(1.0, 1.0, True)
    pairs = list(zip(steps, wanted))
    right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return result(0.0, right / len(wanted), True)


def _steps(text: str) -> list[str]:
    items = "\n".join(line for line in text.splitlines() if line.strip().startswith("-")).strip()
    plain = (_plain(line.partition("-")[2]) for line in items.split("\n") if line.startswith("-"))
    return [step for step in plain if step]


def _plain(step: str) -> str:
    return " ".join(_FILLERS.sub(" ", step.strip().lower().translate(_PUNCTUATION)).split())
