"""The two sides of a comparison as data: a side has cells, each with questions, figures and facts.

A side comes from run folders or tables of rows (`kvbench.compare.reading`), or from a baseline file
(`kvbench.compare.baseline`). Only run folders have the texts of answers.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.eviction.budget import Budget, label

MARK = 2  # characters of a mark, which stands for an answer (see `mark`)
NO_MARK = "." * MARK  # the mark of a sample that was not run
FAILED = ".f"  # the mark of a sample that failed, so that it has no answer or its answer could not be scored
# Three numbers of entries per layer and KV head, each the maximum over a question's answers: after an eviction, at any
# time, and the sum of budget and interval, which bounds the entries while decoding. This bound is None without a
# budget. It is also None if the budget is a share and later turns are new prompts: these hold the model's earlier
# answers, so their budgets depend on the answers, and no row states them.
ENTRIES = ("entries_after_evict", "entries_peak", "bound")
COUNTS = ("output_tokens", "truncated", "no_answer")  # numbers that are summed over a question's answers
# What a method kept while it read one stored answer again: the hash of prompt and answer, and a dictionary of the
# evictions. A key is the number of tokens read before the eviction. Its value is a text with two characters per layer:
# the beginning of a hash of the positions that the layer kept.
Decisions = tuple[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Key:
    """The settings that identify a cell. method: the method's name and, in parentheses, those options that differ from
    the method's defaults."""

    model: str
    task: str
    method: str
    budget: Budget | None = field(compare=False)
    interval: int | None
    seed: str
    # The budget as text. Keys compare this text, because Python finds 1 (one entry) equal to 1.0 (100%).
    size: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", "" if self.budget is None else label(self.budget))

    @property
    def name(self) -> str:
        """The method's name without its options."""
        return self.method.partition("(")[0]

    @property
    def cell(self) -> str:
        """The method, budget and task of the cell in words: ``gkv at 48 on walk``."""
        at = f" at {self.size}" if self.size else ""
        return f"{self.method}{at} on {self.task}"

    def order(self) -> tuple[object, ...]:
        budget = self.budget
        size = (0, 0.0) if budget is None else (2, budget) if isinstance(budget, float) else (1, float(budget))
        return self.task, size, self.method, self.model, self.interval or 0, len(self.seed), self.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The samples of one question in one cell.

    Attributes:
        cluster: the source of the question, such as a text; standard errors cluster by it.
        asked: a hash of the question's prompt and sampling settings; None: unknown.
        scores: the score of each sample; None: the sample has no score.
        marks: the marks (`mark`) of all samples, one after the other.
        answers: the number of samples with an answer.
        totals: sums over these answers, such as their tokens, by the names in `COUNTS`.
        entries: the three numbers `ENTRIES`; None: unknown.
    """

    cluster: str
    asked: str | None
    scores: tuple[float | None, ...]
    marks: str
    answers: int
    totals: Mapping[str, int]
    entries: tuple[float | None, ...]

    def mark(self, sample: int) -> str:
        return self.marks[MARK * sample : MARK * sample + MARK] or NO_MARK

    @property
    def answered(self) -> tuple[int, ...]:
        """The numbers, from 0, of the samples that have an answer."""
        return tuple(sample for sample in range(len(self.scores)) if self.mark(sample) not in (NO_MARK, FAILED))

    def share(self, count: str) -> float:
        """Return the total of a count divided by the number of the question's answers, which must not be 0. count: a
        name in `COUNTS`."""
        return self.totals[count] / self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of one side.

    Attributes:
        run: the names of the runs that its rows come from.
        headline: the name of the score that is compared.
        bounded: whether the budget also bounds the entries of generated tokens.
        facts: the values of `facts.FACTS` (versions, settings, machine) as text; None: unknown.
        figures: memory, speed and share of time spent on evictions, over all answers, by name; unknown figures are
            absent.
        digest: a hash of all answers.
        options: all options of the method, as JSON text.
        decisions: by question, hashes of the positions that the cell's method kept in each layer at each eviction while
            it read a stored answer to the question again; empty if no decisions were recorded.
    """

    key: Key
    run: str
    headline: str
    bounded: bool
    facts: Mapping[str, str | None]
    figures: Mapping[str, float]
    questions: Mapping[str, Question]
    digest: str
    options: str
    decisions: Mapping[str, Decisions] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison. sources: the name and the number of rows of each run whose rows the side holds. For a
    side from a baseline file, these are the runs from which the file was saved. assumed: the tasks that are not
    installed and whose main score no record states; `score` is taken for it."""

    name: str
    cells: Mapping[Key, Cell]
    sources: tuple[tuple[str, int], ...]
    folders: tuple[Path, ...] = ()  # the run folders, which hold the texts; empty for a file
    unfinished: Mapping[str, str] = field(default_factory=dict)  # by run: "412 of 960 rows"
    notices: tuple[str, ...] = ()
    assumed: frozenset[str] = frozenset()

    def headlines(self) -> dict[str, str]:
        """Return the column of the main score of each task for which it is known."""
        return {key.task: cell.headline for key, cell in self.cells.items() if key.task not in self.assumed}


def mark(digest: str) -> str:
    """Return the mark of an answer: two characters computed from the answer's hash. Two different answers get equal
    marks with probability 1 / 4096."""
    return urlsafe_b64encode(hashlib.sha256(digest.encode()).digest()[:3])[:MARK].decode()
