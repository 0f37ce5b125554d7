"""Split prompt templates into context and question; a query-agnostic run evicts at the end of the context."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from kvbench.sources.data import BUNDLED


def bundled(path: str) -> str:
    """Return the text of a file that ships with kvbench, with its line ends unchanged."""
    return (BUNDLED / path).read_bytes().decode()


@functools.cache
def bundled_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a file that ships with kvbench."""
    found: dict[str, Any] = json.loads(bundled(path))
    return found


def parts(template: str, mark: str) -> tuple[str, str]:
    """Split a prompt template into context and question. The context goes up to `mark`, the placeholder of the long
    text, and includes the mark and the line ends right after it; the question is the rest."""
    head, _, tail = template.partition(mark)
    question = tail.lstrip("\n")
    return head + mark + tail[: len(tail) - len(question)], question


def text_id(text: str) -> str:
    """Return a hash of a text, for use as the `Doc.cluster_id` of all questions about this text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
