"""RULER's 13 subtasks, and the five kinds of prompts (families) that they use.

Prompts and settings are NVIDIA/RULER's (`scripts/data/synthetic/constants.py`, `scripts/synthetic.yaml`; Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.task import Turn

SEED = 42
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled(Turn):
    """A prompt made from a template, and the right answers to it (`outputs`).

    cluster: the name of the source text, which several prompts may share; "": none.
    """

    outputs: tuple[str, ...]
    cluster: str = ""

    @property
    def text(self) -> str:
        return self.user + self.answer_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A generated prompt that fits, with the chat template and its answer, into the length of its task."""

    prompt: Filled
    tokens: int  # tokens of the prompt, the chat template and the answer together
    needle_at: int | None = None  # tokens before the first answer (needle subtasks only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of prompt: its template, and how its answers are scored.

    any_reference: True: an answer that contains any reference gets the full score. False: the score is the share of
    references that the answer contains.
    """

    new_tokens: int
    template: str
    answer_prefix: str
    any_reference: bool = False

    def fill(
        self, context: str, outputs: list[str], *, singular: bool = False, cluster: str = "", **words: object
    ) -> Filled:
        """Return the template filled with `context` and `words`; the template's text after the context is the question.

        outputs: the right answers. singular: whether the question asks for one answer, so that the template must be
        worded in the singular. cluster: see `Filled`.
        """
        parts = (*self.template.split("{context}"), self.answer_prefix)
        before, after, prefix = (_singular(part) if singular else part for part in parts)
        before, after, prefix = (part.format(**words) for part in (before, after, prefix))
        question = after.lstrip()
        return Filled(
            context=before + context + after[: len(after) - len(question)],
            question=question,
            answer_prefix=prefix,
            outputs=tuple(outputs),
            cluster=cluster,
        )


def _singular(part: str) -> str:
    for many, one in (("Some", "A"), ("are all", "is"), ("are", "is")):  # as in the official generator
        part = part.replace(many, one)
    return part


@dataclass(frozen=True, slots=True)
class Subtask:
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "niah": Family(
        new_tokens=128,
        template=(
            "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you "
            "about the {kind} afterwards.\n{context}\n"
            "What are all the special magic {kind} for {query} mentioned in the provided text?"
        ),
        answer_prefix=" The special magic {kind} for {query} mentioned in the provided text are",
    ),
    "vt": Family(
        new_tokens=30,
        template=(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            "Question: Find all variables that are assigned the value {query} in the text above."
        ),
        answer_prefix=(
            " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
            "assigned the value {query}, they are: "
        ),
    ),
    "cwe": Family(
        new_tokens=120,
        template=(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
        ),
        answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": Family(
        new_tokens=50,
        template=(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?"
        ),
        answer_prefix=(" Answer: According to the coded text above, the three most frequently appeared words are:"),
    ),
    "qa": Family(
        new_tokens=32,
        template=(
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given "
            "documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}"
        ),
        answer_prefix=" Answer:",
        any_reference=True,
    ),
}

SUBTASKS = {
    "niah_single_1": Subtask("niah", {"haystack": "noise"}),
    "niah_single_2": Subtask("niah", {"haystack": "essay"}),
    "niah_single_3": Subtask("niah", {"haystack": "essay", "values": "uuids"}),
    "niah_multikey_1": Subtask("niah", {"haystack": "essay", "keys_hidden": 4}),
    "niah_multikey_2": Subtask("niah", {"haystack": "needles"}),
    "niah_multikey_3": Subtask("niah", {"haystack": "needles", "keys": "uuids", "values": "uuids"}),
    "niah_multivalue": Subtask("niah", {"haystack": "essay", "values_per_key": 4}),
    "niah_multiquery": Subtask("niah", {"haystack": "essay", "keys_hidden": 4, "keys_asked": 4}),
    "vt": Subtask("vt"),
    "cwe": Subtask("cwe"),
    "fwe": Subtask("fwe"),
    "qa_1": Subtask("qa", {"documents": "squad"}),
    "qa_2": Subtask("qa", {"documents": "hotpotqa"}),
}
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")  # need no download
