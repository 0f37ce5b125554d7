"""Split a prompt template in two: context, which a query-agnostic run may compress, and question.

context, question = parts("Read this.\\n\\n{context}\\n\\nQuestion: {input}", "{context}")
# "Read this.\\n\\n{context}\\n\\n" and "Question: {input}"; joined, they equal the template byte for byte
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvbench.errors import SetupError, quote
from kvbench.sources.data import BUNDLED


def bundled(path: str) -> str:
    """Return the text of a bundled file, with its line ends unchanged."""
    return (BUNDLED / path).read_bytes().decode()


def parts(template: str, mark: str) -> tuple[str, str]:
    """Return the template up to `mark` (the long text) and the line ends after it, then the rest."""
    head, _, tail = template.partition(mark)
    question = tail.lstrip("\n")
    return head + mark + tail[: len(tail) - len(question)], question


def text_id(text: str) -> str:
    """Return the `Doc.cluster_id` of all questions about one text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_ids(task: str, ids: Sequence[str], column: str) -> None:
    """Raise SetupError if two rows share an id."""
    if len(set(ids)) < len(ids):
        raise SetupError(f"data of task {quote(task)}: some values of {quote(column)} occur twice.")
