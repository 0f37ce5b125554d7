"""MathVista's scoring: an answer is extracted from the model's text, brought into a common form, and compared as text.

The official pipeline lets GPT extract the answer from every text that is not an answer already (`direct`); `by_rule` is
kvbench's own extraction, which needs no judge. `normalise` is official, with its peculiarities: of a text that names no
option it takes the option with the smallest edit distance, and it cuts 3.7 to 3 where an integer is asked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.scoring.boxed import last_box

KINDS = ("text", "integer", "float", "list")
_QUOTED = re.compile(r'The answer is "(.*)"\.')
_INTRODUCED = re.compile(r"(?:answer|option|choice|答案)\W{0,3}(?:is|are|为|是|[:：])", re.IGNORECASE)
_NUMBER = re.compile(r"[-−]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[-−]?\.[0-9]+")
_LETTER = re.compile(r"\(([A-Za-z])\)")
_FIRST_LETTER = re.compile(r"[\s*:(]*([A-Z])[\s*]*(?:[).:,]|$)")
_LIST = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The right answer to a question, and its form. kind: one of `KINDS`; choices: empty unless it is one of them."""

    answer: str
    kind: str
    precision: int | None
    choices: tuple[str, ...]


def direct(text: str, wanted: Wanted, *, quoted: bool = False) -> str | None:
    """Return the answer that a text already is, by the official rules; None for a text to extract the answer from.

    quoted: also read ``The answer is "...".``, as with the official option --quick_extract.
    """
    if wanted.choices and text in wanted.choices:
        return text
    if wanted.kind in ("integer", "float"):
        try:
            return str((int if wanted.kind == "integer" else float)(text))
        except ValueError:
            pass
    found = _QUOTED.search(text) if quoted else None
    return found[1] if found else None


def by_rule(text: str, wanted: Wanted) -> str | None:
    """Return the answer in a text: of its last box, else behind its last "answer is", else of its last line."""
    for part in _places(text):
        if (answer := _read(part, wanted)) is not None:
            return answer
    return None


def normalise(extraction: str, wanted: Wanted) -> str | None:
    """Return an extracted answer in the form of the right answers; None if it has no such form."""
    if wanted.choices:
        return _choice(extraction.strip(), wanted.choices)
    try:
        if wanted.kind == "integer":
            return str(int(float(extraction)))
        if wanted.kind == "float":
            return None if wanted.precision is None else str(round(float(extraction), wanted.precision))
    except (ValueError, OverflowError):
        return None
    return extraction


def is_right(extraction: str | None, wanted: Wanted) -> bool:
    return extraction is not None and normalise(extraction, wanted) == wanted.answer


def distance(a: str, b: str) -> int:
    """Return the edit distance (Levenshtein) of two texts."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def _choice(extraction: str, choices: Sequence[str]) -> str:
    if letters := _LETTER.findall(extraction):
        extraction = letters[0].upper()
    index = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    if 0 <= index < len(choices):
        return choices[index]
    return min(choices, key=lambda choice: distance(extraction, choice))


def _places(text: str) -> list[str]:
    """Return the parts of a text in which the answer may stand, the likeliest first."""
    box, lines = last_box(text), [line for line in text.splitlines() if line.strip()]
    ends = [match.end() for match in _INTRODUCED.finditer(text)]
    introduced = [text[end:].split("\n\n")[0] for end in ends[-1:]]
    return [part for part in (box, *introduced, *lines[-1:]) if part]


def _read(part: str, wanted: Wanted) -> str | None:
    if wanted.choices:
        return _option(part, wanted.choices)
    if wanted.kind == "list":
        return _listed(part)
    numbers = _NUMBER.findall(part)
    return numbers[-1].replace(",", "").replace("−", "-") if numbers else None


def _option(part: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the option that a text names by letter, or else the longest option that it contains."""
    last = chr(ord("A") + len(choices) - 1)
    first = _FIRST_LETTER.match(part)
    letters = [*(first.groups() if first else ()), *reversed(_LETTER.findall(part))]
    if named := next((letter.upper() for letter in letters if "A" <= letter.upper() <= last), None):
        return named
    inside = [c for c in choices if re.search(rf"(?<!\w){re.escape(c)}(?!\w)", part, re.IGNORECASE)]
    return max(inside, key=len, default=None)


def _listed(part: str) -> str | None:
    """Return the last list in a text, written as Python writes it."""
    for text in reversed(_LIST.findall(part)):
        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None
