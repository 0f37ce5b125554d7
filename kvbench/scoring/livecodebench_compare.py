"""Compare a program's output with LiveCodeBench's expected output: lines of text, or one JSON value."""

from __future__ import annotations

import json
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

_DIGITS = 50000


def same_lines(printed: str, expected: str) -> bool:
    """Return whether all lines of two texts are equal, without the blanks around each text and around each line. Two
    lines also count as equal if their words are equal decimal numbers."""
    ours, theirs = (text.strip().split("\n") for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    ours, theirs = ours.strip(), theirs.strip()
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except (InvalidOperation, ValueError):
        return False


def same_value(printed: bytes, expected: str, value: Any) -> bool:
    """Return whether the JSON that a program printed equals `value`, which is `expected` after parsing. Bytes that are
    no JSON, or far longer than `expected`, count as unequal."""
    if len(printed) > (64 << 10) + 4 * len(expected):
        return False
    try:
        return bool(read_json(printed) == value)
    except (ValueError, RecursionError):
        return False


def read_json(text: str | bytes) -> Any:
    """Parse JSON with integers of up to `_DIGITS` digits, as LiveCodeBench does. Raises ValueError, RecursionError."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(_DIGITS)
    try:
        return json.loads(text)
    finally:
        sys.set_int_max_str_digits(before)
