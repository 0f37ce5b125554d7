"""Compares two methods on the same questions: their difference, its confidence interval, and the test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.report.stats.clusters import Clusters
from kvbench.report.stats.flips import fewest_clusters, limits, patterns, sign_flip
from kvbench.report.stats.means import ROUNDING, unseen
from kvbench.report.stats.power import POWER, flips_drop, smallest_drop, tail_of, whole_questions_drop
from kvbench.report.stats.samples import Scores, question_means

if TYPE_CHECKING:
    from kvbench.report.stats.samples import Floats

ALPHA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The comparison of two methods, A and B, on the same questions. `diff` is A's mean score minus B's; `p` is
    two-sided.

    test: the test that gave `p` and the interval.
        "t": the t test.
        "sign flips": the test by sign flips of whole clusters (`kvbench.report.stats.flips`), because the t test would
            not hold its level.
        "equal differences": all questions, or the means of all clusters, have the same difference; `p` is the exact p
            of sign flips.
        "none": there are so few clusters that sign flips could not reject "no difference" even if the differences of
            all clusters had the same sign; `p` is 1 and there is no interval.
    """

    diff: float
    se: float
    low: float
    high: float
    df: float
    p: float
    p_sign_flip: float  # two-sided
    mean_a: float
    mean_b: float
    questions: int
    test: str
    clusters: int
    largest: int  # number of questions in the largest cluster
    equal: bool  # whether all clusters have equally many questions
    tail: float  # how much more `se` varies than the standard error of normal data, see `tail_of`
    flipped: tuple[tuple[float, float], ...]  # (sum of differences, size) of each cluster; empty unless "sign flips"

    def drop(self, alpha: float, power: float = POWER) -> float:
        """Return the smallest true drop that the test finds with this power, two-sided at `alpha`.

        If all differences are equal, they have no spread from which a drop could be computed. The drop then comes from
        the number of clusters alone (`whole_questions_drop`). NaN if there are too few clusters for a test, or if the
        test finds no drop.
        """
        if self.test == "equal differences":
            return whole_questions_drop(self.clusters, alpha=alpha, power=power)
        if self.test == "sign flips":
            return flips_drop(self.flipped, alpha=alpha, tail=self.tail, power=power)
        if self.test != "t":
            return math.nan
        return smallest_drop(self.se, self.df, alpha=alpha, tail=self.tail, power=power)


@dataclass(frozen=True, slots=True)
class _Test:
    """The outcome of one test: its name, p, and the confidence interval of the difference."""

    name: str
    p: float = 1.0
    low: float = math.nan
    high: float = math.nan


def paired(
    a: Scores,
    b: Scores,
    *,
    clusters: Sequence[object] | None = None,
    level: float = 0.95,
    permutations: int = 10_000,
    seed: int = 0,
) -> Paired:
    """Compare the scores `a` and `b` of two methods question by question. `p` comes from the paired t test,
    `p_sign_flip` from the test by sign flips.

    Question i of `a` and of `b` must be the same question. `clusters`: for each question the name of its cluster.
    `level`: the level of the confidence interval. `permutations`: the largest number of sign patterns that the test by
    sign flips tries. p is 1 if the scores are identical. `Paired.test` states when another test replaces the t test.
    """
    if len(a) != len(b):
        raise ValueError(f"one method has {len(a)} questions and the other {len(b)}; they cannot be paired")
    means_a, means_b = question_means(a), question_means(b)
    diffs = means_a - means_b
    groups = Clusters.make(clusters, len(diffs))
    diff = float(diffs.mean()) if len(diffs) else math.nan
    se = groups.standard_error(diffs)
    tiny = ROUNDING * max((abs(float(x)) for x in (*means_a, *means_b)), default=0.0)
    if groups.count >= 2 and (se <= tiny or bool((abs(diffs - diff) <= tiny).all())):
        se, diff = 0.0, 0.0 if abs(diff) <= tiny else diff
    p_flip = sign_flip(groups.sums(diffs), permutations=permutations, seed=seed)
    shares = bool(len(diffs)) and min(means_a.min(), means_b.min()) >= 0 and max(means_a.max(), means_b.max()) <= 1
    if groups.count < fewest_clusters(1 - level):  # a t test could reject, but is wrong for so few scores in [0, 1]
        test = _Test("none")
    elif se == 0:
        test = _no_spread(diff, groups, level, shares)
    elif groups.lopsided:
        test = _flips(diffs, diff, groups, p_flip, level, permutations, seed)
    else:
        test = _t(diff, se, groups.df, level)
    return Paired(
        diff=diff,
        se=se,
        low=test.low,
        high=test.high,
        df=groups.df,
        p=test.p,
        p_sign_flip=p_flip,
        mean_a=float(means_a.mean()) if len(diffs) else math.nan,
        mean_b=float(means_b.mean()) if len(diffs) else math.nan,
        questions=len(diffs),
        test=test.name,
        clusters=groups.count,
        largest=groups.largest,
        equal=groups.equal,
        tail=_tail(diffs, groups) if test.name in ("t", "sign flips") else 0.0,
        flipped=tuple(zip(groups.sums(diffs).tolist(), groups.sizes.tolist())) if test.name == "sign flips" else (),
    )


def _t(diff: float, se: float, df: float, level: float) -> _Test:
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(df, 0.5 + level / 2)) * se
    return _Test("t", float(2 * stdtr(df, -abs(diff / se))), diff - half, diff + half)


def _tail(diffs: Floats, groups: Clusters) -> float:
    return tail_of(groups.residuals(diffs), groups.count - 1 if groups.lopsided else groups.df)


def _no_spread(diff: float, groups: Clusters, level: float, shares: bool) -> _Test:
    """Return the test for data in which all questions, or the means of all clusters, have the same difference `diff`.
    shares: whether all scores lie between 0 and 1. If so, the interval allows for questions outside the data, whose
    difference may be anything from -1 to 1; otherwise the interval consists of `diff` alone."""
    bound = unseen(groups, level) if shares else 0.0
    p = 2.0 ** (1 - groups.count) if diff else 1.0  # of all patterns of signs, two give a sum as far from 0
    return _Test("equal differences", p, diff - bound * (1 + diff), diff + bound * (1 - diff))


def _flips(diffs: Floats, diff: float, groups: Clusters, p: float, level: float, permutations: int, seed: int) -> _Test:
    signs = patterns(groups.count, permutations, seed)
    below, above = limits(groups.sums(diffs), groups.sizes, signs, 1 - level)
    return _Test("sign flips", p, diff - float(below), diff + float(above))
