"""The test by sign flips of whole clusters: it tests "no difference" and holds its level for clusters of any sizes.

If two methods are equal, a cluster's sum of differences is as likely to be negative as positive. The test counts how
often random signs make the sum over all clusters at least as far from 0 as the observed sum. If there are at most
`permutations` patterns of signs, the test tries all of them, otherwise it tries `permutations` random patterns from a
seed. This test is the wild cluster bootstrap with Rademacher weights and the null hypothesis imposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.report.stats.samples import Floats


def sign_flip(diffs: Sequence[float] | Floats, *, permutations: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p: how often random signs of `diffs` bring their sum at least as far from 0 as observed.

    diffs: one number per cluster. n numbers other than 0 have 2^n sign patterns. p is exact if there are at most
    `permutations` sign patterns.
    """
    import numpy as np

    values = np.asarray(diffs, dtype=float)
    values = values[values != 0]  # a zero has no sign
    if len(values) == 0:
        return 1.0
    bar = abs(values.sum()) * (1 - 1e-12) - 1e-12  # sums that differ by rounding only are equal
    if 2 ** len(values) <= permutations:
        every = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        return float(np.mean(np.abs(every @ values) >= bar))
    sums = values.sum() - 2 * _random_parts(values, permutations, seed)
    return (int(np.sum(np.abs(sums) >= bar)) + 1) / (permutations + 1)


def _random_parts(values: Floats, permutations: int, seed: int) -> Floats:
    """Return `permutations` sums, each over a random subset of `values`: each value is in it with probability 1/2.

    The values are taken in eights: a random byte picks a subset of eight values, and the sum of this subset is looked
    up among the sums of all 256 subsets. This is five times as fast as a product with a matrix of signs.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    sums = np.zeros(permutations)
    for eight in np.pad(values, (0, -len(values) % 8)).reshape(-1, 8):
        sums += (bits @ eight)[generator.integers(0, 256, size=permutations, dtype=np.uint8)]
    return sums


def fewest_clusters(alpha: float) -> int:
    """Return the smallest number of clusters with which the test by sign flips can reject at `alpha`: 6 at 5%."""
    return math.ceil(1 - math.log2(alpha))


def patterns(clusters: int, permutations: int, seed: int = 0) -> Floats:
    """Return patterns of signs as [patterns, clusters]. The first is the unflipped pattern. All patterns are returned
    if there are at most `permutations` of them; otherwise `permutations` random patterns follow the first. In every
    pattern the first cluster keeps its sign, because a pattern and its negative give equal |sum|."""
    import numpy as np

    free = clusters - 1
    if 2**free <= permutations:
        signs = (np.arange(2**free)[:, None] >> np.arange(free)) & 1
    else:
        signs = np.random.default_rng(seed).integers(0, 2, size=(permutations + 1, free))
        signs[0] = 0
    return np.hstack([np.ones((len(signs), 1)), 1.0 - 2.0 * signs])


def limits(sums: Floats, sizes: Floats, signs: Floats, alpha: float) -> tuple[Floats, Floats]:
    """Return how far the confidence interval at level 1 - `alpha` reaches below and above the mean difference.

    `sums`: [clusters], the sum of the differences in each cluster; or [tables, clusters] for several tables with the
    same clusters. `sizes`: [clusters], the questions in each cluster. `signs`: from `patterns`.

    The interval holds all true differences that the sign-flip test does not reject. The test does not reject a
    difference if enough patterns give a sum at least as far from 0 as the unflipped pattern.

    Q is the number of questions. For each pattern, b is the sum of the clusters' sizes with the pattern's signs, and c
    is the sum of the clusters' deviations from the mean with the same signs. For the difference mean + u, the unflipped
    pattern's sum is Q u away from 0, and another pattern's sum is |c - b u| away from 0 (for mean - u: |c + b u|). The
    largest u with |c - b u| >= Q u has a closed form and is computed for each pattern. The limit is the smallest value
    that at most a share `alpha` of these largest u exceed; it is infinite if there are too few patterns.
    """
    import numpy as np

    total = sizes.sum()
    sign_sizes = signs @ sizes
    rest = sums @ signs.T - (sums.sum(-1, keepdims=True) / total) * sign_sizes
    rank = min(int(alpha * len(signs) * (1 + 1e-12)), len(signs) - 1)

    def limit(slope: Floats) -> Floats:
        room = total + np.where(rest > 0, slope, -slope)
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = np.where(room > 0, np.abs(rest) / room, np.inf)
        bounds[..., 0] = np.inf  # the unflipped pattern itself is as far from 0 for every u
        place = bounds.shape[-1] - 1 - rank
        return np.asarray(np.partition(bounds, place, axis=-1)[..., place])

    return limit(-sign_sizes), limit(sign_sizes)
