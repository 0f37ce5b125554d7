"""What base has and new lacks: cells, and scores of questions and samples, over all stages of a cell.

    absent(matched, new, stages)        # cells
    of_pairs(pairs, new)                # scores of one cell, counted
    is_begun(pair, new)                 # an unfinished run, whose cells are compared on what they have

A score that base has is missing if new lacks the question or the sample, or has no score for it. One reason excuses
that: a run of this very cell in new is unfinished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kvbench.compare.cell import Key, Question, Side
from kvbench.compare.matching import Matched, Pair


def absent(matched: Matched, new: Side, stages: int) -> list[Key]:
    """Return the cells of base that new lacks. With two stages, a cell is not missing but not run yet if new has no
    cell of its seed, and has the same cell with another seed."""
    there = {pair.key for pair in matched.both}
    seeds = {key.seed for key in new.cells}
    return [key for key in matched.missing if not (stages > 1 and key.seed not in seeds and _other_seed(key, there))]


def of_pairs(pairs: Sequence[Pair], new: Side) -> int:
    """Return how many scores of base new lacks; cells of unfinished runs do not count."""
    return sum(_of_pair(pair) for pair in pairs if not is_begun(pair, new))


def is_begun(pair: Pair, new: Side) -> bool:
    """Return whether one of the runs of the new cell is unfinished."""
    return any(run in new.unfinished for run in pair.new.run.split(", "))


def _of_pair(pair: Pair) -> int:
    theirs = pair.new.questions
    return sum(_of_question(mine, theirs.get(name)) for name, mine in pair.base.questions.items())


def _of_question(base: Question, new: Question | None) -> int:
    scores = () if new is None else new.scores
    return sum(
        score is not None and (sample >= len(scores) or scores[sample] is None)
        for sample, score in enumerate(base.scores)
    )


def _other_seed(key: Key, there: Collection[Key]) -> bool:
    return any(replace(key, seed=other.seed) == other for other in there)
