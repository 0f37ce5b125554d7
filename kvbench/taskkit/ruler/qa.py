"""RULER's question answering: each prompt has a question, the documents that belong to it, and other documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from kvbench.errors import SetupError, UserError, bare, quote
from kvbench.taskkit.ruler.fit_length import Prompts, shuffled
from kvbench.taskkit.ruler.recipes import FAMILIES, Filled, Row

STEP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of the data set, its right answers (`outputs`), and the indices of the documents that belong to it.

    own: the documents in every prompt of the question: SQuAD's paragraph with the answer, or all paragraphs that
    HotpotQA lists for the question. near: other documents of the same article. A prompt gets documents of other
    articles only if `own` and `near` are too few.
    """

    query: str
    outputs: list[str]
    own: list[int]
    near: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class QuestionAnswering(Prompts):
    documents: str

    def rows(self, n: int) -> list[Row]:
        room = self.room
        known = len(self._set[0])
        if n > known:
            raise UserError(
                f"task {quote(room.name)} has {known} questions, fewer than {n}. Give --limit {known} or less."
            )
        size = room.size(partial(self.draw, 0), STEP)
        return [room.fit(partial(self.draw, index), size, STEP) for index in range(n)]

    def draw(self, index: int, size: int) -> Filled:
        """Draw a prompt of `size` documents for question number `index`. Raises ValueError if the question has more
        than `size` documents of its own."""
        questions, documents = self._set
        question = questions[index]
        if size >= len(documents):
            chosen = (documents * -(-size // len(documents)))[:size]
        else:
            chosen = [documents[i] for i in self._choose(question, size, len(documents))]
        listed = [f"Document {number}:\n{text}" for number, text in enumerate(shuffled(chosen), start=1)]
        return FAMILIES["qa"].fill(
            "\n\n".join(listed),
            question.outputs,
            cluster=f"{self.documents}-{question.own[0]}" if len(question.own) == 1 else "",
            query=question.query,
        )

    def _choose(self, question: Question, size: int, known: int) -> list[int]:
        more = size - len(question.own)
        if more <= len(question.near):
            return question.own + self.random.sample(question.near, more)
        taken = {*question.own, *question.near}
        others = [i for i in range(known) if i not in taken]
        return question.own + question.near + self.random.sample(others, max(0, more - len(question.near)))

    @cached_property
    def _set(self) -> tuple[list[Question], list[str]]:
        try:
            return squad(self.material.squad()) if self.documents == "squad" else hotpotqa(self.material.hotpotqa())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SetupError(
                f"data of task {quote(self.room.name)} do not have the form of {self.documents} "
                f"({type(error).__name__}: {bare(error)}). Replace 'ruler/{self.documents}.json'."
            ) from None


def squad(data: dict[str, Any]) -> tuple[list[Question], list[str]]:
    """Return the answerable questions of a SQuAD 2.0 file, and all its paragraphs (the documents)."""
    documents = sorted({paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in data["data"]:
        article_numbers = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for own, paragraph in zip(article_numbers, article["paragraphs"]):
            questions += [
                Question(
                    query=asked["question"],
                    outputs=[answer["text"] for answer in asked["answers"]],
                    own=[own],
                    near=[i for i in article_numbers if i != own],
                )
                for asked in paragraph["qas"]
                if not asked["is_impossible"]
            ]
    return questions, documents


def hotpotqa(data: list[dict[str, Any]]) -> tuple[list[Question], list[str]]:
    """Return the questions of a HotpotQA distractor file, and all its paragraphs (the documents)."""
    paragraphs = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in data]
    documents = sorted({text for row in paragraphs for text in row})
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        Question(query=row["question"], outputs=[row["answer"]], own=[number[text] for text in own])
        for row, own in zip(data, paragraphs)
    ]
    return questions, documents
