"""Plants faults in copies of a run, and checks that a comparison of the run with each copy catches the fault.

An unchanged copy must pass the comparison. Nothing is written to disk.

    for check in checks(read_side("main")):
        check.name, check.wanted, check.found      # exit codes of `kvbench compare`

A planted drop of the score also changes the method's source. Otherwise the rule that equal code gives equal answers
would catch the drop before the statistical test does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbench.compare import words
from kvbench.compare.cell import FAILED, Cell, Question, Side
from kvbench.compare.measures import AFTER
from kvbench.compare.outcome import MISSING, PASS, REGRESSION, compare
from kvbench.compare.policy import Policy
from kvbench.errors import UserError, quote
from kvbench.report.stats import ALPHA, fewest_clusters

REFUSED = UserError.exit_code
KEEPS = 5  # every fifth question with a right answer keeps its score when a drop is planted
LEAST = fewest_clusters(ALPHA)  # if fewer clusters fall, a one-sided test at 5% cannot reject after Holm over two cells


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one planted fault. name: the fault. wanted: the exit code that the comparison should return.
    found: the exit code that it returned. says: the comparison's error, its first failure or its summary."""

    name: str
    wanted: int
    found: int
    says: str

    @property
    def caught(self) -> bool:
        return self.wanted == self.found


def checks(side: Side) -> Iterator[Check]:
    """Yield a check for each fault in `FAULTS`. The fault goes into a copy of the evicting cell that has right answers
    in the most clusters; the copy is compared with the unchanged cell. Both sides also hold an unchanged twin of the
    cell with another seed. Raises UserError if no cell has evictions, or if every cell with evictions has right answers
    in too few clusters."""
    evicting = [cell for cell in side.cells.values() if any(one.entries[AFTER] for one in cell.questions.values())]
    if not evicting:
        raise UserError(f"{quote(side.name)} has no cell with evictions. Name a run with a smaller budget.")
    cell = max(evicting, key=_clusters)
    if _clusters(cell) < LEAST:
        least = LEAST + math.ceil(LEAST / (KEEPS - 1))
        raise UserError(
            f"{quote(side.name)}: no drop of the score can be planted. One cell with evictions must have right answers "
            f"to about {least} questions from different clusters, and none has. Name a run with more questions."
        )
    twin = replace(cell, key=replace(cell.key, seed=f"{cell.key.seed} twin"))
    base = replace(side, cells={one.key: one for one in (cell, twin)}, folders=())
    for name, (wanted, plant) in FAULTS.items():
        cells = [one for one in (plant(cell), twin) if one is not None]
        yield Check(name, wanted, *_compared(base, replace(base, cells={one.key: one for one in cells})))


def _compared(base: Side, new: Side) -> tuple[int, str]:
    try:
        outcome = compare(base, new, Policy())
    except UserError as error:
        return REFUSED, str(error)
    failures = [why for _, why in words.failures(outcome)]
    return outcome.exit_code, (failures or [words.summary(outcome)])[0]


def _falling(cell: Cell) -> set[str]:
    """Return the questions whose scores the planted drop sets to 0. These are questions with a score above 0, but every
    fifth of them (`KEEPS`) keeps its score and is not returned."""
    right = [name for name, one in sorted(cell.questions.items()) if any(one.scores)]
    return {name for number, name in enumerate(right) if number % KEEPS}


def _clusters(cell: Cell) -> int:
    return len({cell.questions[name].cluster for name in _falling(cell)})


def _changed(cell: Cell, questions: Mapping[str, Question], **facts: str) -> Cell:
    """Return the cell with some questions replaced, changed facts and another digest of its answers. facts: the new
    values by name."""
    together = {**cell.questions, **questions}
    return replace(cell, questions=together, facts={**cell.facts, **facts}, digest=cell.digest[::-1])


def _dropped(cell: Cell) -> Cell:
    lost = {
        name: replace(one, scores=tuple(None if score is None else 0.0 for score in one.scores))
        for name, one in cell.questions.items()
        if name in _falling(cell)
    }
    return _changed(cell, lost, method_source="planted")


def _first(cell: Cell, **changes: Callable[[Question], Any]) -> Cell:
    """Return the cell with a changed first question. changes: for each field of the question that gets a new value, a
    function that returns this value."""
    name = min(cell.questions)
    question = cell.questions[name]
    changed = replace(question, **{field: new(question) for field, new in changes.items()})
    return _changed(cell, {name: changed})


def _raised(cell: Cell) -> Cell:
    name, question = next((name, one) for name, one in sorted(cell.questions.items()) if one.entries[AFTER])
    after, *others = question.entries
    raised = replace(question, entries=((after or 0) + 1, *others))
    return replace(cell, questions={**cell.questions, name: raised})


UNSCORED: dict[str, Callable[[Question], Any]] = {
    "scores": lambda question: (None, *question.scores[1:]),
    "marks": lambda question: FAILED + question.marks[2:],
    "answers": lambda question: question.answers - 1,
}
FAULTS: dict[str, tuple[int, Callable[[Cell], Cell | None]]] = {
    "nothing": (PASS, lambda cell: cell),
    "a drop of the score": (REGRESSION, _dropped),
    "one more entry after an eviction": (REGRESSION, _raised),
    "a sample without a score": (MISSING, lambda cell: _first(cell, **UNSCORED)),
    "no such cell": (MISSING, lambda cell: None),
    "another prompt": (REFUSED, lambda cell: _first(cell, asked=lambda q: (q.asked or "")[::-1])),
    "another task version": (REFUSED, lambda cell: _changed(cell, {}, task_version="planted")),
}
