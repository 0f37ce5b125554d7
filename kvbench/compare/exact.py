"""Finds the first difference between the answers of two cells that should generate equal tokens.

A run stores no token ids, so the place of the difference is a character of the stored output. A baseline file stores
only two characters of each answer's hash. If a side is a baseline file, the place is therefore only a question and a
sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.compare.cell import Cell
from kvbench.compare.matching import Pair
from kvbench.errors import bare
from kvbench.store.schema import natural
from kvbench.taskkit.names import is_gated

AROUND = 24  # characters of each output that a message shows

Output = Callable[[Cell, str, int], str | None]  # (cell, question, sample) -> the stored output


@dataclass(frozen=True, slots=True)
class First:
    """The first answer that differs between two cells.

    character: the number, from 1, of the first character at which the two outputs differ. If one output begins with the
    whole other output, or both are equal (only numbers of tokens or stop reasons differ), the number is the length of
    the shorter output plus 1. None if an output is not stored or is withheld. base, new: at most `AROUND` characters of
    each output, beginning with the first different character; empty if `character` is None.
    """

    question: str
    sample: int
    answers: int  # number of answers that differ
    character: int | None = None
    base: str = ""
    new: str = ""

    @property
    def words(self) -> str:
        place = f"question {bare(self.question)}, sample {self.sample}"
        if self.character is None:
            return place
        return f"{place}, character {self.character}: '{bare(self.base)}' and '{bare(self.new)}'"


def identical(pair: Pair) -> bool:
    """Return whether both cells have the same samples, with the same answers and scores. False for cells without an
    answer."""
    base, new = pair.base, pair.new
    scored = all(base.questions[name].scores == new.questions[name].scores for name in pair.shared)
    return base.digest == new.digest and scored and any(one.answers for one in base.questions.values())


def first_difference(pair: Pair, base: Output, new: Output) -> First | None:
    """Return the first answer that differs between the cells of a pair, in order of questions and samples; None if the
    answers that both cells have are equal. Answers are compared by their marks (`cell.mark`). base, new: functions that
    look up the stored output of a sample on their side."""
    places = []
    for question in sorted(pair.shared, key=natural):
        mine, theirs = pair.base.questions[question], pair.new.questions[question]
        both = sorted({*mine.answered} & {*theirs.answered})
        places += [(question, sample) for sample in both if mine.mark(sample) != theirs.mark(sample)]
    if not places:
        return None
    question, sample = places[0]
    if is_gated(pair.base.key.task):  # an answer may quote its question
        return First(question, sample, len(places))
    old, now = base(pair.base, question, sample), new(pair.new, question, sample)
    if old is None or now is None:
        return First(question, sample, len(places))
    at = next((i for i, (a, b) in enumerate(zip(old, now)) if a != b), min(len(old), len(now)))
    return First(question, sample, len(places), at + 1, old[at : at + AROUND], now[at : at + AROUND])
