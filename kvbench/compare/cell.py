"""The two sides of a comparison as data: a side has cells, each with questions, figures and facts.

A side comes from run folders (`kvbench.compare.reading`) or from a baseline file (`kvbench.compare.baseline`). The two
differ in one respect: only run folders have the texts of answers.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.eviction.budget import Budget, label

MARK = 2  # letters of a mark
NO_MARK = "." * MARK  # of a sample without an answer
# Entries per layer and KV head: the most of a question's answers after an eviction and at any time, and the most of
# budget + interval, which bounds entries while decoding.
ENTRIES = ("entries_after_evict", "entries_peak", "bound")
COUNTS = ("output_tokens", "truncated", "no_answer")  # totals that a question has over its answers
Scores = tuple[float | None, ...]
Decisions = tuple[str, Mapping[int, str]]  # hash of the text read; by tokens seen, marks of all layers' kept entries


@dataclass(frozen=True, slots=True)
class Key:
    """The settings that identify a cell. method: with the options that differ from the defaults."""

    model: str
    task: str
    method: str
    budget: Budget | None = field(compare=False)
    interval: int | None
    seed: str
    size: str = field(init=False, repr=False)  # the budget in words, compared in its place: 1 entry is not 100%

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", "" if self.budget is None else label(self.budget))

    @property
    def name(self) -> str:
        """The method without its options."""
        return self.method.partition("(")[0]

    @property
    def cell(self) -> str:
        """The cell in words: ``gkv at 48 on walk``."""
        at = f" at {self.size}" if self.size else ""
        return f"{self.method}{at} on {self.task}"

    def order(self) -> tuple[object, ...]:
        budget = self.budget
        size = (0, 0.0) if budget is None else (2, budget) if isinstance(budget, float) else (1, float(budget))
        return self.task, size, self.method, self.model, self.interval or 0, len(self.seed), self.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The samples of one question in one cell.

    asked: a hash of the question's prompt and sampling; None: unknown. scores: by sample number, None for a sample
    without a score. marks: for each sample two letters from the hash of its answer. totals: sums of the `COUNTS` over
    the `answers` answers. entries: the values of `ENTRIES`, each None if unknown.
    """

    cluster: str
    asked: str | None
    scores: Scores
    marks: str
    answers: int
    totals: Mapping[str, int]
    entries: tuple[float | None, ...] = (None, None, None)

    def mark(self, sample: int) -> str:
        return self.marks[MARK * sample : MARK * sample + MARK] or NO_MARK

    @property
    def answered(self) -> tuple[int, ...]:
        """The numbers of the samples with an answer."""
        return tuple(sample for sample in range(len(self.scores)) if self.mark(sample) != NO_MARK)

    def share(self, count: str) -> float:
        """Return the mean of one of the `COUNTS` over the answers."""
        return self.totals[count] / self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of one side.

    facts: the values of `facts.FACTS` (versions, settings, machine) as text; None: unknown. figures: numbers over the
    answers; unknown ones are absent. digest: a hash of all answers. bounded: whether the budget also bounds generated
    entries. options: all options of the method, as JSON. decisions: by question, if they were recorded.
    """

    key: Key
    run: str
    headline: str
    bounded: bool
    facts: Mapping[str, str | None]
    figures: Mapping[str, float]
    questions: Mapping[str, Question]
    digest: str
    options: str = "{}"
    decisions: Mapping[str, Decisions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison. sources: the name and number of rows of each run; for a baseline file those stored in
    it."""

    name: str
    cells: Mapping[Key, Cell]
    sources: tuple[tuple[str, int], ...]
    folders: tuple[Path, ...] = ()  # of the runs, where their texts are; empty for a file
    unfinished: Mapping[str, str] = field(default_factory=dict)  # "412 of 960 rows" by run
    notices: tuple[str, ...] = ()


def mark(digest: str) -> str:
    """Return two letters that stand for an answer with this hash. Different answers get equal letters with probability
    1 / 4096."""
    return urlsafe_b64encode(hashlib.sha256(digest.encode()).digest()[:3])[:MARK].decode()
