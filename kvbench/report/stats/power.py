"""The smallest true drop that a comparison finds with a given power.

    smallest_drop(se, df, alpha=0.05 / 8)              # two-sided t test at Holm's strictest level for 8 tests
    flips_drop(sums_and_sizes, alpha=0.05)             # test by sign flips of whole clusters
    whole_questions_drop(30, alpha=0.05)               # for data without spread

A test finds a true drop if the drop exceeds half the width of the test's confidence interval at `alpha`, plus the noise
of the mean. Each result is estimated from one table of scores. Over many tables, the mean of the results is the drop
that the test finds with the given power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.report.stats.flips import limits, patterns

if TYPE_CHECKING:
    from kvbench.report.stats.samples import Floats

POWER = 0.8
SIGNS = 2047  # random sign patterns from which a drop is estimated, beside the unflipped pattern
MOST_CORRECTION = 4.0  # largest correction in `tail_of`; data with about 8 clusters reach it


def smallest_drop(se: float, df: float, *, alpha: float, power: float = POWER, tail: float = 0.0) -> float:
    """Return the smallest true drop that a two-sided t test finds with the given power; NaN without spread.

    `se`, `df`: the standard error and its degrees of freedom. `alpha`: the level. `tail`: the result of `tail_of`; 0
    for normal data.
    """
    from scipy.special import stdtrit

    if not (df > 0 and se > 0):
        return math.nan
    critical = float(stdtrit(df, 1 - alpha / 2))
    return _beyond(critical * se, critical, 1 / (2 * df) + tail, power)


def _beyond(half: float, critical: float, varies: float, power: float) -> float:
    """Return the drop that exceeds, with probability `power`, half the interval's width (critical x se) plus the noise.

    half: the mean of (critical x se). critical: the quantile of t. varies: the squared coefficient of variation of se,
    the standard error.

    Noise and se vary. The drop must therefore exceed the mean of (critical x se + noise) by a normal quantile times the
    standard deviation of this sum. The variance of critical x se is mean(se)^2 critical^2 varies, and the variance of
    the noise is mean(se)^2 (1 + varies).
    """
    from scipy.special import ndtri

    return half * (1 + float(ndtri(power)) / critical * math.sqrt(1 + (1 + critical**2) * varies))


def tail_of(residuals: Floats, df: float) -> float:
    """Return what heavy tails add to the squared coefficient of variation of a standard error, which is 1 / (2 df) for
    normal data.

    `residuals`: one per cluster. The result follows from their kurtosis above that of normal data. Few clusters show
    only a part of a heavy tail, so Fisher's small-sample correction of kurtosis is applied twice. In simulations with
    scores near 0 and 1 and a nominal power of 80%, the true power is 75 to 80% with one correction, 77 to 83% with two.
    """
    squares = residuals**2
    total = float(squares.sum())
    if not (total > 0 and df > 0):
        return 0.0
    excess = max(0.0, float((squares**2).sum()) / total**2 - 3 / (df + 2))
    fisher = df * (df + 2) / ((df - 1) * (df - 2)) if df > 2 else math.inf
    return excess * min(fisher**2, MOST_CORRECTION) / 4


def flips_drop(
    clusters: Sequence[tuple[float, float]], *, power: float = POWER, alpha: float = 0.05, tail: float = 0.0
) -> float:
    """Return the smallest true drop that the two-sided test by sign flips of clusters finds with the given power. NaN
    if this test finds no drop.

    `clusters`: (sum of differences, number of questions) of each cluster. `alpha`: the level. `tail`: as in
    `smallest_drop`. The drop is computed from half the width of the test's own interval, as if this were a t interval
    over the same number of equal clusters. How alike the questions of a cluster are is not estimated, because a few
    clusters hardly show it. In simulations, the ratio of drop to half width hardly depends on the sizes of the
    clusters; it is 1.43 at level 5% and power 80%.
    """
    import numpy as np
    from scipy.special import stdtrit

    sums, sizes = np.array(clusters).T
    below, above = limits(sums, sizes, patterns(len(sizes), SIGNS), alpha)
    half = float(below + above) / 2
    if not math.isfinite(half):
        return math.nan
    df = len(sizes) - 1
    return _beyond(half, float(stdtrit(df, 1 - alpha / 2)), 1 / (2 * df) + tail, power)


def whole_questions_drop(clusters: int, *, power: float = POWER, alpha: float = 0.05) -> float:
    """Return the smallest drop that a two-sided t test at level `alpha` finds with this power. The drop is a share of
    questions that turn from right to wrong. clusters: the number of questions, each a cluster of its own. NaN if the
    test rejects for no number of changed questions from 1 to `clusters` - 1."""
    from scipy.stats import beta
    from scipy.stats import t as student

    critical = float(student.isf(alpha / 2, clusters - 1)) if clusters > 1 else math.inf
    for lost in range(1, clusters):
        if math.sqrt(lost * (clusters - 1) / (clusters - lost)) >= critical:
            return float(beta.ppf(power, lost, clusters - lost + 1))
    return math.nan
