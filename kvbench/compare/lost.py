"""Finds cells, and scores of samples, that the base side has and the new side lacks.

    absent(matched, new, stages)        # the cells that new lacks
    of_pairs(pairs, new)                # how many scores of one cell new lacks
    is_unfinished(pair, new)            # whether the new cell may get more rows

base and new are the two sides. A score of base is missing in new if new lacks the question or the sample, or has no
score for the sample. In an unfinished cell only failed samples count: the others may still get a score, and the cell is
compared on the scores that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from kvbench.compare.cell import FAILED, Key, Question, Side
from kvbench.compare.matching import Matched, Pair


def absent(matched: Matched, new: Side, stages: int) -> list[Key]:
    """Return the cells of base that new lacks. stages: 1, or 2 if each cell is tested on two seeds.

    With 2 stages, the list leaves out a cell of base if the new side was probably not yet run with its seed: no cell of
    new has this seed, but both sides have the cell with another seed.
    """
    there = {pair.key for pair in matched.both}
    seeds = {key.seed for key in new.cells}
    return [key for key in matched.missing if not (stages > 1 and key.seed not in seeds and _other_seed(key, there))]


def of_pairs(pairs: Sequence[Pair], new: Side) -> int:
    """Return how many scores of one cell base has and new lacks. pairs: for each seed, the cell on both sides."""
    return sum(_of_pair(pair, is_unfinished(pair, new)) for pair in pairs)


def is_unfinished(pair: Pair, new: Side) -> bool:
    """Return whether a run from which the new cell's rows come is unfinished."""
    return any(run in new.unfinished for run in pair.new.run.split(", "))


def _of_pair(pair: Pair, unfinished: bool) -> int:
    lost = [
        (pair.new.questions.get(name), sample)
        for name, mine in pair.base.questions.items()
        for sample in _unscored(mine, pair.new.questions.get(name))
    ]
    return sum(not unfinished or (theirs is not None and theirs.mark(sample) == FAILED) for theirs, sample in lost)


def _unscored(base: Question, new: Question | None) -> list[int]:
    """Return the numbers, from 0, of the samples of a question that have a score in base and none in new. new: None if
    new lacks the question."""
    both = zip_longest(base.scores, new.scores if new else ())
    return [sample for sample, (old, now) in enumerate(both) if old is not None and now is None]


def _other_seed(key: Key, there: Collection[Key]) -> bool:
    return any(replace(key, seed=other.seed) == other for other in there)
