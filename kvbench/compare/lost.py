"""Finds cells, and scores of samples, that the base side has and the new side lacks.

    absent(matched, new, stages)        # the cells that new lacks
    of_pairs(pairs, new)                # how many scores of one cell new lacks
    is_begun(pair, new)                 # whether the new cell is unfinished

base and new are the two sides. A score of base is missing in new if new lacks the question or the sample, or has no
score for the sample. Missing scores do not count if the new cell is unfinished (`is_begun`): such a cell is compared on
the scores that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from kvbench.compare.cell import Key, Side
from kvbench.compare.matching import Matched, Pair


def absent(matched: Matched, new: Side, stages: int) -> list[Key]:
    """Return the cells of base that new lacks. stages: 1, or 2 if each cell is tested on two seeds.

    With 2 stages, perhaps the new side was not yet run with the second seed. So the list leaves out a cell of base if
    no cell of new has that cell's seed, and both sides have the same cell with another seed.
    """
    there = {pair.key for pair in matched.both}
    seeds = {key.seed for key in new.cells}
    return [key for key in matched.missing if not (stages > 1 and key.seed not in seeds and _other_seed(key, there))]


def of_pairs(pairs: Sequence[Pair], new: Side) -> int:
    """Return how many scores of one cell base has and new lacks. pairs: for each seed, the cell on both sides."""
    return sum(_of_pair(pair) for pair in pairs if not is_begun(pair, new))


def is_begun(pair: Pair, new: Side) -> bool:
    """Return whether the new cell has an answer, and a run from which its rows come is unfinished.

    A cell of an unfinished run is not excused if all its rows so far have failed: it has no answer.
    """
    answers = any(question.answers for question in pair.new.questions.values())
    return answers and any(run in new.unfinished for run in pair.new.run.split(", "))


def _of_pair(pair: Pair) -> int:
    scores = {name: question.scores for name, question in pair.new.questions.items()}
    both = ((mine.scores, scores.get(name, ())) for name, mine in pair.base.questions.items())
    # a: the base's score of a sample, b: the new score of the same sample; None: missing
    return sum(a is not None and b is None for old, new in both for a, b in zip_longest(old, new))


def _other_seed(key: Key, there: Collection[Key]) -> bool:
    return any(replace(key, seed=other.seed) == other for other in there)
