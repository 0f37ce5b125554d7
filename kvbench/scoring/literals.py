"""Python literals (dictionaries, lists) that a model or a judge wrote into its text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any


def literals(texts: Iterable[str]) -> Iterator[Any]:
    """Yield the values of those texts that are Python literals. Nothing in the texts is run."""
    for text in texts:
        try:
            yield ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # TypeError: a list as a key
            continue
