"""Computes the confidence interval of a mean near 0 or 1.

Such a mean depends on a few questions with a right (or a wrong) answer. The mean's standard error is mostly too small,
because the few questions drawn seldom include one of the rare answers that would raise it. The interval therefore
assumes that the difficulty of questions has a Beta distribution with unknown a and b. A question's number of right
samples is then beta-binomial. The ends of the interval are quantiles of the posterior of the Beta distribution's mean.
The prior of the mean is Beta(3/4, 3/4), which lies between Jeffreys' prior and a flat prior; the prior of the
correlation 1 / (a + b + 1) is flat on the logit. Both priors were chosen by simulated coverage (results/statistics).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvbench.report.stats.samples import Scores

if TYPE_CHECKING:
    from kvbench.report.stats.samples import Floats

PRIOR = 0.75
MOST_TRIALS = 64
SHARES = 32  # number of 0/1 trials that stand for a score between 0 and 1


def edge_interval(scores: Scores, means: Floats, repeats: float, level: float) -> tuple[float, float]:
    """Return the ends of the confidence interval, at `level`, of a mean score near 0 or 1. means: the mean score of
    each question. repeats: how many questions together count as one observation (`Clusters.repeats`)."""
    import numpy as np
    from scipy.special import expit, logsumexp

    trials = _trials(scores)
    right = np.rint(means * trials)
    right[(right == 0) & (means > 0)] = 1
    right[(right == trials) & (means < 1)] = trials - 1
    counts = np.bincount(right.astype(int), minlength=trials + 1) / repeats
    used = counts > 0
    grid, likelihood = _likelihood(trials)
    joint = np.tensordot(counts[used], likelihood[used], 1)
    mean = expit(grid)
    log = logsumexp(joint, axis=1) + PRIOR * np.log(mean * (1 - mean))
    density = np.exp(log - log.max())
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    low, high = expit(np.interp([0.5 - level / 2, 0.5 + level / 2], below / below[-1], grid))
    return float(low), float(high)


def _trials(scores: Scores) -> int:
    """Return how many 0/1 trials stand for the mean score of one question: the mean number of samples per question,
    but at most MOST_TRIALS. If a score lies strictly between 0 and 1, the result is at least SHARES."""
    import numpy as np

    every = np.concatenate([np.asarray(question, dtype=float) for question in scores])
    samples, whole = round(len(every) / len(scores)), bool(((every == 0) | (every == 1)).all())
    return min(samples, MOST_TRIALS) if whole else max(SHARES, min(samples, MOST_TRIALS))


@lru_cache(maxsize=16)
def _likelihood(trials: int) -> tuple[Floats, Floats]:
    """Return the candidate means, as logits, and an array [right trials, mean, correlation]: the log likelihood, up to
    a constant, of each number of right trials of a question."""
    import numpy as np
    from scipy.special import betaln, expit

    grid = np.arange(-12, 12.001, 0.1)
    mean = expit(grid)[None, :, None]
    precision = np.exp(np.linspace(-6, 6, 13))[None, None, :]
    right = np.arange(trials + 1)[:, None, None]
    a, b = mean * precision, (1 - mean) * precision
    return grid, betaln(right + a, trials - right + b) - betaln(a, b)
