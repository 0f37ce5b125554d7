"""MRCR (OpenAI, 2025): copy one of several replies to the same request in a long conversation.

A question is a conversation: a message with an example, requests with their replies, and a last message. One request
occurs 2, 4 or 8 times; its replies are the needles. The last message asks the model to write given random characters
and then to copy the first, second, ... needle. Score: `kvbench.scoring.mrcr`.

Data: openai/mrcr (MIT), 800 questions per number of needles. docs/tasks.md lists the columns as public evaluation code
reads them; they were not compared with the hub. `desired_msg_index` is the index of the request, not of its reply.
kvbench pins the same commit as this evaluation code; the commit has the corrections of December 2025.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from kvbench.errors import UserError, quote
from kvbench.registry import tasks
from kvbench.scoring.mrcr import score_copy
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import answer, documents

NEW_TOKENS = 2048
ROWS = 800  # per number of needles
LONGEST_TOKEN = 16  # no conversation has more characters per token, as a mean


@tasks.register("mrcr")
class Mrcr(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    summary = "MRCR, copy one of 2, 4 or 8 similar messages in a conversation of 4K to 1M tokens"
    variants = ("2needle", "4needle", "8needle")
    group = True
    lengths = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {"mean of 3": dict.fromkeys(variants, 1.0)}

    def __init__(self, variant: str = "", length: int = 0) -> None:
        super().__init__(variant, length)
        self.kept = 0  # number of conversations in the range of this length

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each number of needles
        return Manifest(
            path="mrcr/mrcr.jsonl",
            rows=ROWS,
            hub="openai/mrcr",
            split="train",
            revision="f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d",
            where={"n_needles": int(self.variant.removesuffix("needle"))},
            samples=("mrcr/mrcr.sample.jsonl",),
            licence="MIT",
        )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        rows = [row for row in enumerate(source.rows(self.name, self.manifest)) if self._may_fit(row[1])]
        docs = [doc for doc in documents(self, rows, self._doc) if self._is_in_range(doc)]
        if not docs:
            between = f"more than {self.length // 2} and at most {self.length} tokens of this model"
            raise UserError(f"task {quote(self.name)} has no conversation of {between}. Give another length.")
        self.kept = len(docs)
        return docs[:limit]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=NEW_TOKENS, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        scores = score_copy(answer(output), doc.reference["answer"], doc.reference["prefix"])
        return Score(value=scores.pop("score"), aux=scores)

    def size(self) -> int | None:
        return None  # depends on the model's tokenizer

    def notes(self) -> list[str]:
        low = self.length // 2
        size = f"more than {low} and at most {self.length} tokens"
        return [f"task {quote(self.name)} has {self.kept} conversations of {size}."]

    def _doc(self, numbered: tuple[int, Mapping[str, Any]]) -> Doc:
        number, row = numbered
        messages = [(str(message["role"]), str(message["content"])) for message in json.loads(row["prompt"])]
        *history, (_, question) = messages
        depth = int(row["desired_msg_index"]) * 10 // len(messages) * 10
        return Doc(
            doc_id=f"{self.variant}-{number}",
            turns=(Turn(history=tuple(history), question=question),),
            reference={"answer": str(row["answer"]), "prefix": str(row["random_string_to_prepend"])},
            meta={"category": f"depth {depth:03d}%"},
        )

    def _may_fit(self, row: Mapping[str, Any]) -> bool:
        """Return whether a conversation (`row`) may be in the range of `length`, judged by its number of characters.
        This avoids counting the tokens of every conversation, which is slow."""
        text = row.get("prompt")
        if self.reader is None or not isinstance(text, str):  # `_doc` reports a missing text
            return True
        return self.length // 2 < len(text) <= LONGEST_TOKEN * self.length

    def _is_in_range(self, doc: Doc) -> bool:
        """Return whether conversation and answer have more than `length` / 2 and at most `length` tokens. Without a
        model, the result is always True."""
        if self.reader is None:
            return True
        texts = [doc.turns[0].question, doc.reference["answer"], *(text for _, text in doc.turns[0].history)]
        return self.length // 2 < sum(map(self.reader.count, texts)) <= self.length
