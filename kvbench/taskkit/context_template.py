"""Prompt templates in two parts: the context, after which a query-agnostic run evicts, and the question."""

from __future__ import annotations

import hashlib

from kvbench.sources.data import BUNDLED


def bundled(path: str) -> str:
    """Return the text of a bundled file, with its line ends unchanged."""
    return (BUNDLED / path).read_bytes().decode()


def parts(template: str, mark: str) -> tuple[str, str]:
    """Split a template in two after `mark` (the place of the long text) and the line ends that follow the mark."""
    head, _, tail = template.partition(mark)
    question = tail.lstrip("\n")
    return head + mark + tail[: len(tail) - len(question)], question


def text_id(text: str) -> str:
    """Return the `Doc.cluster_id` that all questions about one text share: a hash of the text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
