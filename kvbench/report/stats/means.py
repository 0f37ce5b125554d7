"""Computes the score of one method: its mean over questions, with two standard errors and a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.report.stats.clusters import Clusters
from kvbench.report.stats.edge import edge_interval
from kvbench.report.stats.samples import Scores, by_length, question_means

if TYPE_CHECKING:
    from kvbench.report.stats.samples import Floats

LEVEL = 0.95  # of the confidence interval
FEW_QUESTIONS = 40  # with so few clusters, or a mean near 0 or 1, t intervals are too narrow or leave [0, 1]
NEAR_EDGE = 0.1  # distance from 0 or 1 that counts as near
FEW_RIGHT = 10  # with fewer right (or wrong) answers, the spread is hardly known
ROUNDING = 1e-12  # standard errors and differences below this share of the largest score count as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over questions with its uncertainty.

    rule: how the confidence interval was made.
        "t": from the t distribution.
        "wilson": by Wilson's formula, with the effective number of questions.
        "beta": by `edge_interval`, for few right or few wrong answers.
        "rule of three": the standard error is 0 and says nothing, because all questions, or the means of all clusters,
            have the same score. The interval allows for unseen questions with any score from 0 to 1 (`unseen`).
        "constant": the same for scores that may lie outside of [0, 1]; there is no interval.
        "one question": there is one question or one cluster, and no interval.
    """

    mean: float
    se: float  # standard error if new questions of this kind are drawn
    se_fixed: float  # standard error if only new samples of the same questions are drawn
    low: float
    high: float
    rule: str
    questions: int
    samples: int


def estimate(scores: Scores, *, clusters: Sequence[object] | None = None) -> Estimate:
    """Return the mean of question means (pass@1) with error bars. `clusters`: for each question the name of its
    cluster, which is the source that questions share."""
    means = question_means(scores)
    groups = Clusters.make(clusters, len(means))
    mean = float(means.mean()) if len(means) else math.nan
    se = groups.standard_error(means)
    if se <= ROUNDING * max(map(abs, means.tolist()), default=0.0):
        se = 0.0
    low, high, rule = _interval(scores, means, mean, se, groups)
    return Estimate(
        mean=mean,
        se=se,
        se_fixed=_fixed_se(scores),
        low=low,
        high=high,
        rule=rule,
        questions=len(means),
        samples=sum(len(question) for question in scores),
    )


def _fixed_se(scores: Scores) -> float:
    """Return the standard error of the mean score that comes from sampling noise alone, with the questions fixed:
    sqrt(sum of s_q^2 / n_q) / Q, where s_q^2 is the variance of question q's n_q samples, and Q the number of
    questions. For 0/1 scores with mean p, s_q^2 / n_q is p(1-p)/(n_q-1). NaN if a question has fewer than two
    samples."""
    import numpy as np

    if min((len(question) for question in scores), default=0) < 2:
        return math.nan
    noise = np.empty(len(scores))
    for places, samples in by_length(scores):
        noise[places] = samples.var(axis=1, ddof=1) / samples.shape[1]
    return float(np.sqrt(noise.sum()) / len(scores))


def _interval(scores: Scores, means: Floats, mean: float, se: float, groups: Clusters) -> tuple[float, float, str]:
    from scipy.special import stdtrit

    if groups.count < 2:
        return math.nan, math.nan, "one question"
    share = bool((means >= 0).all() and (means <= 1).all())
    if se == 0:
        bound = unseen(groups, LEVEL) if share else math.nan
        return mean - bound * mean, mean + bound * (1 - mean), "rule of three" if share else "constant"
    repeats = groups.repeats(means)
    if share and min(mean, 1 - mean) * groups.questions / repeats < FEW_RIGHT:
        return *edge_interval(scores, means, repeats, LEVEL), "beta"
    df = groups.count - 1 if groups.lopsided else groups.df
    quantile = float(stdtrit(df, 0.5 + LEVEL / 2))
    if share and (groups.count <= FEW_QUESTIONS or not NEAR_EDGE <= mean <= 1 - NEAR_EDGE):
        return *_wilson(mean, mean * (1 - mean) / se**2, quantile), "wilson"
    low, high = mean - quantile * se, mean + quantile * se
    return (max(0.0, low), min(1.0, high), "t") if share else (low, high, "t")


def unseen(groups: Clusters, level: float) -> float:
    """Return an upper confidence bound on the share of all possible questions whose score differs from the one score
    that all observed questions, or the means of all clusters, have.

    The bound is -log(1 - level) / n for n clusters of equal size: about 3 / n at 95%. If the clusters differ in size, n
    is the number of equal clusters with the same sum of squared weights.
    """
    import numpy as np

    return min(1.0, -math.log(1 - level) * float(np.sum(groups.sizes**2)) / groups.questions**2)


def _wilson(mean: float, n: float, z: float) -> tuple[float, float]:
    """Return Wilson's confidence interval for a share `mean` seen in `n` independent trials; `n` need not be whole. z:
    the quantile of the level; `_interval` passes a quantile of t."""
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
