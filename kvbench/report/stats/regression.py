"""Tests two versions of one method on the same questions: is the new version worse, and by how much at most?

    found = regression(base, new)
    found.p, found.p_sign_flip         # one-sided: is `new` worse?
    found.low > -margin                # one-sided at 95%: is `new` worse by less than `margin`?
    found.drop(0.05)                   # the smallest true drop that the test finds with 80% power

A one-sided test at level a is a two-sided test at level 2a. The test is therefore `paired`, which treats clusters, few
questions and equal differences as in a report. The lower bounds are computed here:

- If all differences are equal, the lower bound is the lower end of a report's 95% interval, which is one-sided at 95%
  too (`unseen`; about -3 / Q for Q questions without a difference).
- The bound of a t test has two corrections. One is for skewness (Hall 1992): if a drop is real, questions that are
  nearly always right hardly change and others fall far. Without this correction, the t bound would pass a drop as large
  as the margin in 6 to 8% of tables instead of 5%. The other correction is for continuity.
- If few questions changed, t says little. So, for scores from 0 to 1, the t bound is kept between two bounds of
  `_free_low`, which suppose that one more cluster was observed and fell. It is at most the bound with a fall of one
  sample per question, and at least the bound with a fall of whole questions. With one sample per question the two are
  equal; the bound then falls with every further lost answer, and is Clopper and Pearson's if answers only got lost.

The versions may be tested in two stages: one test with one seed, and a second test with another seed. The two stages
together reject at level a if each of them rejects at sqrt(a); `both` combines their two p-values into one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.report.stats.clusters import Clusters
from kvbench.report.stats.compare import ALPHA, Paired, paired
from kvbench.report.stats.means import unseen
from kvbench.report.stats.power import POWER
from kvbench.report.stats.samples import Scores, question_means

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvbench.report.stats.samples import Floats

HALF = 0.5  # continuity correction: this share of the step by which one sample changes the mean
HIDDEN = 2.0  # factor for the skewness, of which few questions show only a part: with 2 the bound holds (simulated)
LEAST_ROOT = 0.4  # smallest cube root in Hall's transformation; nearer to 0 the bound would rise as questions fall


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """The outcome of a regression test. The difference is the new version's mean score minus base's. `p`,
    `p_sign_flip`: one-sided, small if the new version is worse. `low`: the lower bound of the difference, one-sided at
    95%; NaN if there are too few clusters for a bound. `paired`: the two-sided comparison."""

    p: float
    p_sign_flip: float
    low: float
    paired: Paired

    @property
    def diff(self) -> float:
        return self.paired.diff

    def drop(self, alpha: float, *, stages: int = 1) -> float:
        """Return the smallest true drop that all stages together find with 80% power. A stage is a test with a seed of
        its own. alpha: the one-sided level of all stages together. stages: the number of stages."""
        return self.paired.drop(2 * alpha ** (1 / stages), POWER ** (1 / stages))


def regression(
    base: Scores, new: Scores, *, clusters: Sequence[object] | None = None, permutations: int = 10_000, seed: int = 0
) -> Regression:
    """Test `new` against `base` question by question. Question i of `base` and of `new` must be the same question. p is
    1 if the scores are identical. `clusters`: for each question the name of its cluster. `permutations`: the largest
    number of sign patterns that the test by sign flips tries."""
    found = paired(new, base, clusters=clusters, level=1 - 2 * ALPHA, permutations=permutations, seed=seed)
    low, groups = found.low, Clusters.make(clusters, len(new))
    if found.test == "t":
        before, now, step = question_means(base), question_means(new), len(new) / sum(map(len, new))
        low = max(-1.0, _skewed_low(found, groups.residuals(now - before)) - HALF * step / len(new))
        if _are_shares(before) and _are_shares(now):
            low = _free_low(now - before, groups, step, -1.0, low) if step < 1 else -1.0
            low = _free_low(now - before, groups, 1.0, low, 1.0)
    elif found.test == "equal differences" and found.low < found.diff:  # scores in [0, 1]; `unseen` is one-sided
        low = found.diff - unseen(groups, 1 - ALPHA) * (1 + found.diff)
    p, p_sign_flip = (_one_sided(p, found) for p in (found.p, found.p_sign_flip))
    return Regression(p=p, p_sign_flip=p_sign_flip, low=max(low, -1.0), paired=found)


def both(first: float, second: float) -> float:
    """Return one p-value for two stages, which are independent tests, from their p-values. This p-value is at most a if
    and only if both p-values are at most sqrt(a), which has probability a if nothing changed."""
    return max(first, second) ** 2


def _one_sided(p: float, found: Paired) -> float:
    """Return the p for "new is worse" from the two-sided p of a symmetric test."""
    if found.test == "none" or found.diff == 0 or math.isnan(found.diff):
        return 1.0
    return p / 2 if found.diff < 0 else 1 - p / 2


def _are_shares(means: Floats) -> bool:
    return bool(means.min() >= 0 and means.max() <= 1)


def _skewed_low(found: Paired, residuals: Floats) -> float:
    """Return the lower bound of the mean difference. If the differences have a long lower tail, the bound comes from
    Hall's transformation of t, otherwise from t. residuals: one per cluster."""
    from scipy.special import stdtrit

    n, critical = found.clusters, float(stdtrit(found.df, 1 - ALPHA))
    third, second = float((residuals**3).mean()), float((residuals**2).mean())
    skew = HIDDEN * third / second**1.5 * math.sqrt(n - 1) / (n - 2)  # divided by the root of n
    if skew > -1e-9:
        return found.low
    skew = max(skew, 3 * critical - math.sqrt(9 * critical**2 + 6 * (1 - LEAST_ROOT**3)))
    return found.diff - found.se * 3 / skew * (math.cbrt(1 + skew * (critical - skew / 6)) - 1)


def _free_low(diffs: Floats, groups: Clusters, fall: float, least: float, most: float) -> float:
    """Return Gaffke's (2005) lower bound of the mean difference, limited to the interval from `least` to `most`. The
    bound assumes only that no question can fall by more than `fall`.

    One more cluster joins the observed clusters. Its questions all fell by `fall`, and its size is the mean size of a
    question's cluster (`Clusters.mean_size`). The clusters then get random weights; all weights with the sum 1 are
    equally probable. The bound is the 5% quantile of the weighted mean.
    """
    import numpy as np
    from scipy.optimize import brentq

    sums = np.append(groups.sums(diffs), -fall * groups.mean_size)
    sizes = np.append(groups.sizes, groups.mean_size)
    (sums, sizes), counts = np.unique(np.round([sums, sizes], 9), axis=1, return_counts=True)

    def excess(mean: float) -> float:
        return _chance_below(sums - mean * sizes, counts) - ALPHA

    if excess(least) >= 0:
        return least
    return most if excess(most) <= 0 else float(brentq(excess, least, most, xtol=1e-7))


def _chance_below(values: Floats, counts: NDArray[Any]) -> float:
    """Return the probability that a sum of independent exponential variables, each times its value, is below 0. counts:
    how often each value occurs.

    The probability is the integral of the sum's moment generating function, divided by the argument, along a vertical
    line left of 0. Every line on which the function exists gives the same result. The line here is near the saddle
    point, where 100 points are enough.
    """
    import numpy as np
    from scipy.integrate import trapezoid

    if values.min() >= 0 or values.max() <= 0:
        return float(values.max() <= 0)
    left, right = 1 / values.min(), 0.0
    for _ in range(25):  # bisection for the saddle point: there the derivative of the function's logarithm is 0
        line = (left + right) / 2
        left, right = (left, line) if (counts * values / (1 - values * line)).sum() > 0 else (line, right)
    width = (counts * (values / (1 - values * line)) ** 2).sum() ** -0.5
    steps = np.linspace(0, 8, 101)
    points = line + 1j * width * np.sinh(steps)
    heights = np.exp(-(np.log(1 - np.outer(points, values)) @ counts)) / points
    return float(-trapezoid(heights.real * width * np.cosh(steps), steps) / math.pi)
