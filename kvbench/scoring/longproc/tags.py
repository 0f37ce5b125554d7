"""Find an answer between tags, and make the dictionary of scores that LongProc's scorers return."""

from __future__ import annotations


def between(text: str, tag: str) -> str | None:
    """Return the text between the first ``<tag>`` and the first ``</tag>``, without blanks at its ends; None if one of
    the tags is missing."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if start < 0 or end < 0 else text[start + len(tag) + 2 : end].strip()


def result(accuracy: float, partial: float, extracted: bool) -> dict[str, float]:
    return {"accuracy": accuracy, "partial_accuracy": partial, "extraction_rate": float(extracted)}
