"""Connect tasks with RULER's generators: compute how many tokens a prompt may have, and turn prompts into documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.errors import UserError, quote
from kvbench.task import Doc, Task
from kvbench.taskkit.ruler.counts import TokenCounts, cache_file
from kvbench.taskkit.ruler.fit_length import Room
from kvbench.taskkit.ruler.recipes import Row


@contextmanager
def room_for(task: Task, new_tokens: int) -> Iterator[Room]:
    """Yield the `Room` of a task: a prompt with its answer may have `task.length` tokens.

    new_tokens: how many of these tokens are reserved for the answer.

    The chat template's tokens are counted with thinking off. Raises UserError if the model's context is shorter than
    `task.length`, or if the task has no reader.
    """
    reader = task.reader
    if reader is None:
        raise UserError(f"task {quote(task.name)} makes its prompts with a model's tokenizer; give the run a model.")
    if task.length > reader.context:
        raise UserError(
            f"task {quote(task.name)} makes prompts of {task.length} tokens; the model's context is {reader.context}. "
            f"Take a shorter length, such as @{2 ** (reader.context.bit_length() - 1)}."
        )
    with TokenCounts(reader.count, cache_file(reader.tokenizer, task.variant, task.length)) as count:
        yield Room(
            name=task.name,
            asked=task.length,
            wrapping=reader.wrapping(thinking=False),
            new_tokens=new_tokens,
            count=count,
        )


def document(doc_id: str, row: Row, category: str) -> Doc:
    """Return a generated prompt (`row`) as a document with one turn."""
    prompt = row.prompt
    meta = {"category": category} | ({} if row.needle_at is None else {"needle_at": row.needle_at})
    return Doc(doc_id=doc_id, turns=(prompt,), reference=prompt.outputs, meta=meta, cluster_id=prompt.cluster)


def place_of_needle(doc: Doc) -> dict[str, float]:
    """Return {"needle_at": N} if N tokens of the prompt come before the first right answer; {} without a needle.
    NVIDIA's generators call this number `token_position_answer`."""
    return {"needle_at": float(doc.meta["needle_at"])} if "needle_at" in doc.meta else {}
