"""Reads JSON that anyone may have written. Every kind of invalid input raises ValueError; only `lenient`
accepts NaN and infinities.

Python's own reader accepts NaN, reads 1e400 as infinity, and raises RecursionError for deep nesting.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 32
LARGEST = 2**64  # seeds are unsigned


def parse(data: bytes | str) -> Any:
    """Parse one JSON value. Raises ValueError for invalid JSON, NaN, infinities and nesting beyond the interpreter's
    limit."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        return _STRICT.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def lenient(data: bytes | str) -> Any:
    """Parse one JSON value. NaN and infinities are allowed, because Python and transformers write them. Raises
    ValueError for invalid JSON and for nesting beyond the interpreter's limit."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def document(data: bytes | str) -> Any:
    """Parse one JSON value as `parse` does, but with limits. Raises ValueError also for more than DEEPEST levels and
    for whole numbers beyond 64 bits. Code can therefore safely walk the value and write it again."""
    value = parse(data)
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(v, int) and abs(v) > LARGEST for v in level):
            raise ValueError("a number beyond 64 bits")
        nested = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))]
        level = [inner for values in nested for inner in values]
        if not level:
            return value
    raise ValueError("nested too deeply")


def constant(name: str) -> Any:
    """Raise ValueError for NaN and the infinities, which Python's reader would accept."""
    raise ValueError(f"{name} is not allowed")


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is too large")
    return value


# Made once, because `json.loads` would make one per call.
_STRICT = json.JSONDecoder(parse_constant=constant, parse_float=finite)
