"""Compare an output's answer with the reference mathematically, by three rules.

`value`: math-verify finds the answer in the whole output, and compares it with the reference (as in G-KV, the
reference is the first argument). `strict`: math-verify compares the last balanced box after the thinking block with the
reference; an output without a box is wrong. `int_match` (in `aux`, for AIME and AMC): the content of this box must be a
plain integer that equals the reference.

If the prompt asks for the answer after a marker ("Answer:") and the output has one, the answer is the text behind the
last marker, for all three rules.

math-verify interrupts itself after `SECONDS` by SIGALRM. This works only in the main thread of a process, and some
sympy calls ignore the signal. Therefore score in a `kvbench.scoring.pool.ScorePool`, never in a thread. As in
math-verify, a time-out counts as wrong; aux ``timeout`` shows it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbench.scoring.boxed import after_thinking, last_box
from kvbench.task import Score

SECONDS = 5  # per parse and per comparison
LONGEST = 500  # characters of an extracted answer that a row keeps


def score_math(text: str, answer: str, *, thinking: bool | None, integer: bool = False, marker: str = "") -> Score:
    """Score an output (`text`) against a reference answer, which is LaTeX or a number, without a box. thinking: whether
    the model thinks; None: unknown. integer: also compute `int_match`. marker: the text after which the prompt asks for
    the answer; "": it asks for a box."""
    shown = after_thinking(text, thinking)
    marked = behind_marker(shown, marker) if marker else None
    box = last_box(shown) if marked is None else marked
    with _noted_timeouts() as timeouts:
        gold = _parse(boxed(answer))
        parsed = _parse(text if marked is None else boxed(marked))
        value = _verify(gold, parsed)
        strict = box is not None and _verify(gold, _parse(boxed(box)))
    aux = {"no_answer": float(not box), "timeout": float(timeouts.seen)}
    if integer:
        aux["int_match"] = float(int_match(answer, box))
    extracted = box if box is not None else next((f for f in reversed(parsed) if isinstance(f, str)), None)
    return Score(
        value=float(value),
        strict=float(strict),
        extracted=extracted and extracted[:LONGEST],
        aux=aux,
        note="math-verify ran out of time" if timeouts.seen else "",
    )


def boxed(answer: str) -> str:
    return "\\boxed{" + answer + "}"


def behind_marker(text: str, marker: str) -> str | None:
    """Return the answer behind the last `marker` that text follows; None without one.

    The answer is in the rest of the marker's line or, if that is empty, in the next line with text. It is the content
    of the last box there or, without a box, all text there without marks of Markdown and LaTeX around it.
    """
    again = re.escape(marker)  # a heading such as "**Final Answer:**" may stand before the marker's own line
    lines = re.findall(rf"{again}(?:[\s*$]|\\[(\[])*+(?!{again})(\S.*)", text, re.IGNORECASE)
    if not lines:
        return None
    if (box := last_box(lines[-1])) is not None:
        return box
    line = lines[-1].replace("\\$", "").replace("$", "").rstrip("*. ")
    return line.removesuffix("\\)").removesuffix("\\]").strip() or None


def int_match(answer: str, box: str | None) -> bool:
    """Return whether a box holds a plain integer ("025") that equals the reference ("25" or "25.0"). answer: the
    reference. box: the content of the output's box; None without a box."""
    if box is None or not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", box):
        return False
    try:
        return float(answer) == int(box)
    except ValueError:
        return False


def normalise_answer(answer: str) -> str:
    """Return an answer's normal form for majority votes: "025", "25.0" and " 25" all become "25"."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", answer)
    text = re.sub(r"\\[,;:!]|\\left|\\right|\\(?:text|mathrm)\b|[\s$]", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = text.strip("{}.") if text.count("{") != text.count("}") else text.rstrip(".")
    number = text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    if re.fullmatch(r"[-+]?\d{1,15}(\.\d+)?", number):
        value = float(number)
        return str(int(value)) if value == int(value) else repr(value)
    return text


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=SECONDS))


def _verify(gold: list[Any], parsed: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, parsed, timeout_seconds=SECONDS))


class _Timeouts(logging.Handler):
    """A log handler that notes math-verify's time-outs, because math-verify only logs them as warnings."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = self.seen or record.getMessage().startswith("Timeout during")


@contextmanager
def _noted_timeouts() -> Iterator[_Timeouts]:
    handler = _Timeouts(logging.WARNING)
    logger = logging.getLogger("math_verify")
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False  # math-verify's warnings quote the whole output
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
