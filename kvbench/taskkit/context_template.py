"""Prompt templates around a long text, in two parts: what a query-agnostic run may compress, and the question.

context, question = parts("Read this.\\n\\n{context}\\n\\nQuestion: {input}", "{context}")
# "Read this.\\n\\n{context}\\n\\n" and "Question: {input}": joined, the template byte for byte
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvbench.errors import SetupError, show
from kvbench.sources.data import BUNDLED


def bundled(path: str) -> str:
    """The text of a file that comes with kvbench, its line ends as they are."""
    return (BUNDLED / path).read_bytes().decode()


def parts(template: str, mark: str) -> tuple[str, str]:
    """A template up to its long text, with the line ends behind it, and from there on."""
    head, _, tail = template.partition(mark)
    question = tail.lstrip("\n")
    return head + mark + tail[: len(tail) - len(question)], question


def text_id(text: str) -> str:
    """Names a text that several questions may share: their `Doc.cluster_id`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_ids(task: str, ids: Sequence[str], column: str) -> None:
    """Raises SetupError when a name stands for two rows: they would be taken for one."""
    if len(set(ids)) < len(ids):
        raise SetupError(f"data of task {show(task)}: some values of {show(column)} occur twice.")
