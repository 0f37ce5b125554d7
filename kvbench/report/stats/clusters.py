"""Computes the standard error of a mean over questions, and its degrees of freedom. Questions that share a source form
a cluster.

A mean over questions whose clusters are about equally large gets the bias-reduced standard error CR2 (Bell and
McCaffrey 2002) with Satterthwaite's degrees of freedom. With one question per cluster, the standard error and the
degrees of freedom are those of the ordinary t test.

If one cluster has many more questions than the others, a t test does not hold its level. The residuals then hardly show
how much the large cluster adds to the error. Clusters of such unequal sizes are called lopsided (`Clusters.lopsided`).
For them, tests flip the signs of whole clusters, and the standard error comes from two variance components: one between
clusters and one within clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# If clusters reach both of these limits, a t test at a level of 5% has 3 to 7% false alarms, whether or not the
# questions of a cluster have similar values.
LEAST_FREEDOM = 2 / 3  # Satterthwaite's degrees of freedom divided by those of equally large clusters
LEAST_SEEN = 0.8  # share of the true variance that CR2 finds when all questions of a cluster have the same value

# The correlations of two questions of a cluster that `Clusters.components` tries.
CORRELATIONS = (0.0, 0.01, 0.02, 0.05, *(step / 20 for step in range(2, 20)), 0.98, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Questions grouped by the source that they share. `places`: for each question the number of its cluster, from 0;
    `sizes`: the number of questions in each cluster."""

    places: NDArray[np.intp]
    sizes: Floats

    @classmethod
    def make(cls, names: Sequence[object] | None, questions: int) -> Clusters:
        """Group questions by the names of their clusters. Without names, each question is a cluster of its own.
        questions: the number of questions."""
        import numpy as np

        if names is None:
            return cls(np.arange(questions), np.ones(questions))
        if len(names) != questions:
            raise ValueError(f"there are {len(names)} cluster names for {questions} questions; give one per question")
        index: dict[object, int] = {}
        places = np.array([index.setdefault(name, len(index)) for name in names], dtype=np.intp)
        return cls(places, np.bincount(places, minlength=len(index)).astype(float))

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def questions(self) -> int:
        return len(self.places)

    @property
    def largest(self) -> int:
        return int(self.sizes.max()) if self.count else 0

    @property
    def mean_size(self) -> float:
        """The size of a question's cluster, averaged over the questions: 1 if no two questions share a cluster."""
        import numpy as np

        return float(np.sum(self.sizes**2)) / self.questions

    @property
    def equal(self) -> bool:
        return bool(self.count and (self.sizes == self.sizes[0]).all())

    def sums(self, values: Floats) -> Floats:
        import numpy as np

        return np.bincount(self.places, weights=values, minlength=self.count).astype(float)

    @property
    def df(self) -> float:
        """Satterthwaite's degrees of freedom of CR2, computed as if questions were independent."""
        if self.equal or self.count < 2:
            return float(max(self.count - 1, 0))
        share = self.sizes**2 / (self.questions * (1 - self.sizes / self.questions))
        spread = (self.sizes**2).sum() + share.sum() ** 2 - (share**2).sum()
        return float(self.questions**2 / spread)

    @property
    def lopsided(self) -> bool:
        """Whether a few clusters are so large that the t test does not hold its level."""
        if self.equal or self.count < 2:
            return False
        weights = self.sizes / self.questions
        whole = (weights**2).sum()
        seen = (weights**2 * (1 - 2 * weights + whole) / (1 - weights)).sum() / whole
        return bool(self.df < LEAST_FREEDOM * (self.count - 1) or seen < LEAST_SEEN)

    def standard_error(self, values: Floats) -> float:
        """Return the standard error of the mean of `values`, one value per question. NaN with one cluster."""
        import numpy as np

        if self.count < 2:
            return math.nan
        if self.lopsided:
            return float(np.sqrt(self.variances(values).sum()) / self.questions)
        return float(np.sqrt(np.sum(self.residuals(values) ** 2)) / self.questions)

    def residuals(self, values: Floats) -> Floats:
        """Return a residual for each cluster: the sum of the deviations of the cluster's values from the mean, weighted
        as in CR2. If the clusters are lopsided, this sum is divided by the sum's standard deviation instead."""
        import numpy as np

        sums = self.sums(values - values.mean())
        return np.asarray(sums / np.sqrt(self.variances(values) if self.lopsided else 1 - self.sizes / self.questions))

    def variances(self, values: Floats) -> Floats:
        """Return the variance of each cluster's sum of values. It follows from the variance between clusters and the
        variance within clusters (`components`)."""
        between, within = self.components(values)
        return within * self.sizes + between * self.sizes**2

    def components(self, values: Floats) -> tuple[float, float]:
        """Return the variance of values between clusters and the variance within clusters, estimated by restricted
        maximum likelihood."""
        import numpy as np

        if self.count < 2 or self.count == self.questions:
            return 0.0, float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
        means, spare = self.sums(values) / self.sizes, self.questions - self.count
        inside = float(np.sum((values - means[self.places]) ** 2))
        shared = np.array(CORRELATIONS)[:, None]
        variances = shared + (1 - shared) / self.sizes
        weights = 1 / variances
        middle = (weights @ means / weights.sum(1))[:, None]
        squares = np.sum(weights * (means - middle) ** 2, axis=1) + inside / (1 - shared[:, 0])
        if not (squares > 0).all():
            return 0.0, 0.0
        misfit = (self.questions - 1) * np.log(squares) + np.sum(np.log(variances), axis=1)
        misfit += spare * np.log(1 - shared[:, 0]) + np.log(weights.sum(1))
        best = int(np.argmin(misfit))
        total = float(squares[best]) / (self.questions - 1)
        return CORRELATIONS[best] * total, (1 - CORRELATIONS[best]) * total

    def correlation(self, values: Floats) -> float:
        """Return the correlation of two questions of the same cluster; 0 if no two questions share a cluster."""
        between, within = self.components(values)
        return between / (between + within) if between > 0 else 0.0

    def repeats(self, values: Floats) -> float:
        """Return how many questions together count as one independent observation, because questions of a cluster have
        similar values.

        The estimate is 1 if the questions are independent. It is largest if all questions of a cluster have the same
        value: it is then the size of a question's cluster, averaged over the questions. If all clusters have equal
        sizes, the result is the estimate. Otherwise the result lies a quarter of the way, on a log scale, from the
        estimate to the largest possible estimate, because data with only a few right answers hardly show how similar
        the questions of a cluster are.
        """
        shown = 1 + self.correlation(values) * (self.mean_size - 1)
        return shown if self.equal else shown**0.75 * self.mean_size**0.25
