"""Code that task files share: documents from a table of data, sampling of reasoning tasks, answers without thinking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvbench.errors import SetupError, bare, quote
from kvbench.scoring.boxed import after_thinking
from kvbench.task import Doc, GenSpec, Output, Task


def documents(
    task: Task, rows: Iterable[Any], make: Callable[[Any], Doc], *, ids: str = "", lacks: str = "column "
) -> list[Doc]:
    """Return one document per row of a task's data; `make` builds it.

    Raises SetupError in three cases: a row lacks a field, a row has a value of a wrong form, or two documents share an
    id.

    ids: the name of the column with the ids; "": do not check that ids differ. lacks: the word before a missing field's
    name in the message.
    """
    docs = []
    for number, row in enumerate(rows, 1):
        try:
            docs.append(make(row))
        except KeyError as error:
            raise SetupError(
                f"data of task {quote(task.name)} have no {lacks}{quote(error.args[0])}. Give data that have it."
            ) from None
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise SetupError(
                f"data of task {quote(task.name)}, row {number}, have a value of a wrong form ({bare(error)}). "
                "Download the data again or correct the row."
            ) from error
    if ids and len({doc.doc_id for doc in docs}) < len(docs):
        raise SetupError(
            f"data of task {quote(task.name)}: some values of {quote(ids)} occur twice. Remove the repeated rows."
        )
    return docs


def texts_of(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """Return a column's list of texts. Raises ValueError for a text, which would be read as a list of its letters."""
    if isinstance(row[column], str):
        raise ValueError(f"{quote(column)} must be a list of texts, and is the text {quote(row[column])}")
    return tuple(row[column])


def reasoning(model_type: str, *, n: int = 1, max_new_tokens: int) -> GenSpec:
    """Return the sampling settings that papers use for reasoning tasks: temperature 0.6, top-p 0.95, thinking on; top-k
    20 for Qwen3. n: the number of samples per question."""
    top_k = 20 if model_type.startswith("qwen3") else 0
    return GenSpec(n=n, max_new_tokens=max_new_tokens, temperature=0.6, top_p=0.95, top_k=top_k, thinking=True)


def answer(output: Output) -> str:
    """Return the text of a model's output without its thinking block and the line ends behind the block."""
    return visible(output.text, output.thinking)


def visible(text: str, thinking: bool | None) -> str:
    """Return a turn's text as `answer` does for the last turn. thinking: as in `Output`."""
    shown = after_thinking(text, thinking)
    return shown if shown == text else shown.lstrip("\n")
