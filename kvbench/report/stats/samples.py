"""Statistics of one method's samples, without error bars: question means, pass@k, majority votes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Scores = Sequence[Sequence[float]]  # one inner sequence per question


def question_means(scores: Scores) -> Floats:
    """Return the mean score of each question. Raises ValueError for a question without a sample, which would silently
    change the mean."""
    import numpy as np

    means = np.empty(len(scores))
    for places, samples in by_length(scores):
        if samples.shape[1] == 0:
            raise ValueError("a question has no samples, so its mean score is undefined")
        means[places] = samples.mean(axis=1)
    return means


def by_length(scores: Scores) -> Iterator[tuple[list[int], Floats]]:
    """Group questions by their number of samples. For each group, yield the indices of its questions and the scores of
    these questions as [questions, samples]."""
    import numpy as np

    places: dict[int, list[int]] = {}
    for place, question in enumerate(scores):
        places.setdefault(len(question), []).append(place)
    for group in places.values():
        yield group, np.array([scores[place] for place in group], dtype=float)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the chance that k of n samples, drawn without replacement, contain a
    right sample. With c right samples (`correct`) the estimate is 1 - C(n-c, k) / C(n, k).

    Raises ValueError unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n, not n={n}, correct={correct}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def mean_pass_at_k(scores: Scores, k: int) -> float:
    """Return pass@k averaged over questions. A sample counts as right when its score is 1. Raises ValueError if a
    question has fewer than k samples."""
    return sum(pass_at_k(len(q), sum(s == 1 for s in q), k) for q in scores) / len(scores)


def maj_at_n(
    answers: Sequence[Sequence[str | None]], scores: Scores, *, same: Callable[[str], str] = str.strip
) -> float:
    """Return maj@n: the score of each question's most frequent answer, averaged over the questions. Of equally frequent
    answers, the first is taken. A question without an answer scores 0.

    `same` returns the spelling of an answer under which votes are counted, so that equal answers in several spellings
    count together (for mathematics: `kvbench.scoring.math.normalise_answer`).
    """
    total = 0.0
    for own_answers, own_scores in zip(answers, scores, strict=True):
        first: dict[str, float] = {}
        votes: Counter[str] = Counter()
        for answer, score in zip(own_answers, own_scores, strict=True):
            if answer is not None and answer.strip():
                votes[same(answer)] += 1
                first.setdefault(same(answer), score)
        if votes:
            total += first[max(votes, key=votes.__getitem__)]  # max returns the first of equals
    return total / len(scores)
