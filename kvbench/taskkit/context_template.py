"""Split a prompt template around a long text into context, which a query-agnostic run may compress, and question.

context, question = parts("Read this.\\n\\n{context}\\n\\nQuestion: {input}", "{context}")
# "Read this.\\n\\n{context}\\n\\n" and "Question: {input}": joined, the template byte for byte
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvbench.errors import SetupError, quote
from kvbench.sources.data import BUNDLED


def bundled(path: str) -> str:
    """The text of a bundled file, with its own line ends."""
    return (BUNDLED / path).read_bytes().decode()


def parts(template: str, mark: str) -> tuple[str, str]:
    """A template up to and with its long text and the line ends after it, and the rest."""
    head, _, tail = template.partition(mark)
    question = tail.lstrip("\n")
    return head + mark + tail[: len(tail) - len(question)], question


def text_id(text: str) -> str:
    """The `Doc.cluster_id` of questions about one text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_ids(task: str, ids: Sequence[str], column: str) -> None:
    """Raises SetupError if two rows share an id."""
    if len(set(ids)) < len(ids):
        raise SetupError(f"data of task {quote(task)}: some values of {quote(column)} occur twice.")
