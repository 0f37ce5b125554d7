"""The smallest true drop that a comparison finds with a given power.

smallest_drop(se, df, sides=2, alpha=0.05 / 8)     # of a two-sided t test at Holm's strictest step among eight
flips_drop(se, sizes, correlation, alpha=0.05)     # of sign flips of whole clusters
whole_questions_drop(30, alpha=0.05)               # where the data show no spread
"""

from __future__ import annotations

import math
from functools import lru_cache

from kvbench.stats.flips import limits, patterns

POWER = 0.8
DRAWS = 1000  # of noise, for sign flips: their power has no formula
SIGNS = 2047


def smallest_drop(se: float, df: float, *, power: float = POWER, alpha: float = 0.05, sides: int = 1) -> float:
    """The true drop that a t test with this standard error finds with the given power. NaN without spread."""
    if not (df > 0 and se > 0):
        return math.nan
    return _t_multiple(round(df, 6), power, alpha / sides) * se


@lru_cache(maxsize=1024)
def _t_multiple(df: float, power: float, alpha: float) -> float:
    """The shift, in standard errors, at which a one-sided t test at `alpha` has this power."""
    from scipy.optimize import brentq
    from scipy.stats import nct
    from scipy.stats import t as student

    critical = float(student.ppf(1 - alpha, df))
    return float(brentq(lambda shift: nct.sf(critical, df, shift) - power, 0.0, 10 * critical + 10))


def flips_drop(
    se: float, sizes: tuple[float, ...], correlation: float, *, power: float = POWER, alpha: float = 0.05
) -> float:
    """The same for two-sided sign flips of clusters, whose questions have this correlation. NaN where nothing is."""
    if not se > 0:
        return math.nan
    return _flips_multiple(tuple(sorted(sizes)), round(correlation, 1), power, alpha) * se


@lru_cache(maxsize=256)
def _flips_multiple(sizes: tuple[float, ...], correlation: float, power: float, alpha: float) -> float:
    """Standard errors that the limit of the test's interval stays below with this probability, by simulation."""
    import numpy as np

    size = np.array(sizes)
    variances = size * (1 + (size - 1) * correlation)
    noise = np.random.default_rng(0).normal(size=(DRAWS, len(size))) * np.sqrt(variances)
    signs = patterns(len(size), SIGNS)
    far = [limits(part, size, signs, alpha)[1] for part in np.array_split(noise, 10)]
    reach = np.concatenate(far) + noise.sum(1) / size.sum()
    drop = float(np.quantile(reach, power, method="higher"))
    return drop / float(np.sqrt(variances.sum()) / size.sum()) if math.isfinite(drop) else math.nan


def whole_questions_drop(clusters: int, *, power: float = POWER, alpha: float = 0.05) -> float:
    """The share of questions that must go from right to wrong for a two-sided t test to find it with this power."""
    from scipy.stats import beta
    from scipy.stats import t as student

    critical = float(student.isf(alpha / 2, clusters - 1)) if clusters > 1 else math.inf
    for lost in range(1, clusters):
        if math.sqrt(lost * (clusters - 1) / (clusters - lost)) >= critical:
            return float(beta.ppf(power, lost, clusters - lost + 1))
    return math.nan
