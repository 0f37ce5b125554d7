"""Unequal clusters, intervals near 0 and 1, and the printed drop: level, coverage and power in simulated tables.

The committed tables in results/statistics have 2,000 tables a setting; these have a few hundred and wider bounds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.report.stats import Clusters, estimate, judge, paired, sign_flip, smallest_drop
from kvbench.report.stats.power import flips_drop, tail_of
from tests.support.simulate import Setting, power

VERY_UNEQUAL = ([40] + [2] * 10, [1] * 30 + [30])
DESIGNS = ([3] * 20, list(range(1, 13)), *VERY_UNEQUAL)


def names(sizes: list[int]) -> list[int]:
    return [number for number, size in enumerate(sizes) for _ in range(size)]


def differences(sizes: list[int], agree: float, draw: np.random.Generator) -> np.ndarray:
    """Normal, on average 0; those of a cluster have this correlation."""
    own, shared = draw.normal(size=sum(sizes)), np.repeat(draw.normal(size=len(sizes)), sizes)
    return math.sqrt(1 - agree) * own + math.sqrt(agree) * shared


@pytest.mark.parametrize("agree", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sizes", DESIGNS, ids=str)
def test_false_alarms_of_clusters_of_any_size(sizes: list[int], agree: float) -> None:
    draw, zeros = np.random.default_rng(7), [[0.0]] * sum(sizes)
    tables = 300
    alarms = 0
    for _ in range(tables):
        values = differences(sizes, agree, draw)[:, None]
        alarms += paired(values, zeros, clusters=names(sizes), permutations=1100).p <= 0.05
    assert 0.015 <= alarms / tables <= 0.095  # 0.05 and 3.5 standard errors


@pytest.mark.parametrize("spread", [1.1, 5.0])
@pytest.mark.parametrize("mean", [0.01, 0.99])
def test_intervals_near_the_edge_cover(mean: float, spread: float) -> None:
    draw, setting = np.random.default_rng(8), Setting("30 questions", mean, spread=spread)
    found = [estimate(setting.one(draw)) for _ in range(400)]
    assert 0.92 <= np.mean([f.low <= mean <= f.high for f in found]) <= 0.995


@pytest.mark.parametrize("family", [1, 8])
def test_the_verdict_has_the_printed_power(family: int) -> None:
    found = power(Setting("30 questions", 0.5), family, 300, np.random.default_rng(9))
    assert 0.71 <= found["share"] <= 0.89


def test_the_drop_of_a_family_is_that_of_its_strictest_step() -> None:
    draw = np.random.default_rng(10)
    family = [paired(draw.random((30, 4)), draw.random((30, 4)), permutations=1) for _ in range(8)]
    for one, judged in zip(family, judge(family)):
        assert judged.smallest_drop == pytest.approx(smallest_drop(one.se, 29, alpha=0.05 / 8, tail=one.tail))
        assert judged.smallest_drop > one.drop(0.05) > smallest_drop(one.se, 29, alpha=0.1)


def found_at_its_printed_drop(noise: np.ndarray, sizes: list[int], family: int) -> float:
    """How often the mean of the printed drops is found in other tables with this noise, at Holm's strictest step."""
    zeros, alpha = [[0.0]] * sum(sizes), 0.05 / family

    def tables(rows: np.ndarray) -> list:
        return [paired(row[:, None], zeros, clusters=names(sizes), permutations=1100) for row in rows]

    half = len(noise) // 2
    drop = np.mean([one.drop(alpha) for one in tables(noise[:half])])
    return float(np.mean([one.p <= alpha and one.diff < 0 for one in tables(noise[half:] - drop)]))


@pytest.mark.parametrize("family", [1, 8])
@pytest.mark.parametrize("agree", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [list(range(1, 13)), [40] + [2] * 10], ids=str)
def test_the_printed_drop_is_right_on_average_however_questions_agree(
    sizes: list[int], agree: float, family: int
) -> None:
    draw = np.random.default_rng(16)
    noise = np.array([differences(sizes, agree, draw) for _ in range(1000)])
    assert 0.74 <= found_at_its_printed_drop(noise, sizes, family) <= 0.86  # 0.8 and 3.4 standard errors


def test_sign_flips_of_equal_clusters_have_the_drop_of_the_t_test() -> None:
    rows = np.random.default_rng(21).normal(size=(200, 12))
    flips = np.mean([flips_drop([(value, 1.0) for value in row]) for row in rows])
    t = np.mean([smallest_drop(row.std(ddof=1) / math.sqrt(12), 11, alpha=0.05) for row in rows])
    assert flips == pytest.approx(t, rel=0.015)


@pytest.mark.parametrize("family", [1, 8])
def test_the_printed_drop_counts_heavy_tails(family: int) -> None:
    """As near 0 and 1: a few questions differ much, most hardly."""
    draw = np.random.default_rng(17)
    noise = draw.normal(size=(4000, 30)) * np.where(draw.random((4000, 30)) < 0.1, 6, 1)
    assert 0.77 <= found_at_its_printed_drop(noise, [1] * 30, family) <= 0.83


def test_tails_are_the_unbiased_kurtosis_of_scipy() -> None:
    from scipy.stats import kurtosis

    values = np.random.default_rng(18).standard_t(5, size=2000)
    values -= values.mean()
    assert tail_of(values, 1999) * 4 * 2000 == pytest.approx(kurtosis(values, bias=False), rel=0.01)
    assert tail_of(np.repeat([1.0, -1.0], 20), 39) == 0
    assert tail_of(np.zeros(5), 4) == 0


@pytest.mark.parametrize("sizes", [[1] * 12, [3] * 5, list(range(1, 8)), [4, 4, 2, 2, 1]], ids=str)
def test_standard_error_and_freedom_by_matrices(sizes: list[int]) -> None:
    """CR2 and Satterthwaite's degrees of freedom as Bell and McCaffrey define them, for a regression on a constant."""
    places, total = np.array(names(sizes)), sum(sizes)
    values = np.random.default_rng(11).normal(size=total)
    residual = np.eye(total) - np.ones((total, total)) / total
    rows, adjusted = [], []
    for cluster in range(len(sizes)):
        mine = np.flatnonzero(places == cluster)
        eigen, vectors = np.linalg.eigh(residual[np.ix_(mine, mine)])
        root = vectors @ np.diag(1 / np.sqrt(eigen)) @ vectors.T
        adjusted.append(np.ones(len(mine)) @ root @ residual[mine] / total)
        rows.append(float(adjusted[-1] @ values))
    spread = np.array(adjusted) @ np.array(adjusted).T
    groups = Clusters.make(list(places), total)
    assert groups.standard_error(values) == pytest.approx(math.sqrt(np.sum(np.square(rows))))
    assert groups.df == pytest.approx(np.trace(spread) ** 2 / np.sum(spread**2))
    assert not groups.lopsided


def test_one_question_a_cluster_is_the_ordinary_t() -> None:
    from scipy.stats import ttest_rel

    draw = np.random.default_rng(12)
    a, b = draw.random((25, 1)), draw.random((25, 1))
    found, known = paired(a, b), ttest_rel(a[:, 0], b[:, 0])
    assert (found.test, found.df) == ("t", 24)
    assert found.p == pytest.approx(known.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()))


@pytest.mark.parametrize("sizes", VERY_UNEQUAL, ids=str)
def test_the_interval_of_sign_flips_holds_what_the_test_keeps(sizes: list[int]) -> None:
    draw = np.random.default_rng(13)
    values = differences(sizes, 0.3, draw) + 0.2
    found = paired(values[:, None], [[0.0]] * len(values), clusters=names(sizes))
    assert found.test == "sign flips"
    groups = Clusters.make(names(sizes), len(values))
    for inside, outside in ((found.low + 0.02, found.low - 0.02), (found.high - 0.02, found.high + 0.02)):
        assert sign_flip(groups.sums(values - inside)) > 0.05 > sign_flip(groups.sums(values - outside))


def test_too_few_lopsided_clusters_get_no_verdict() -> None:
    sizes = [30, 1, 1, 1, 1]
    values = np.random.default_rng(14).normal(5.0, 0.1, sum(sizes))[:, None]
    found = paired(values, [[0.0]] * len(values), clusters=names(sizes))
    (judged,) = judge([found])
    assert (found.test, found.p, judged.verdict) == ("none", 1.0, "unknown")
    assert math.isnan(judged.smallest_drop)


def test_equal_differences_say_what_could_have_been_seen() -> None:
    same = paired([[1.0]] * 30, [[1.0]] * 30)
    assert (same.low, same.high) == (pytest.approx(-0.1, rel=0.01), pytest.approx(0.1, rel=0.01))
    (judged,) = judge([same])
    assert judged.verdict == "tied"
    draw = np.random.default_rng(15)
    lost = draw.random((400, 30)) < judged.smallest_drop
    worse = [judge([paired(1.0 - row[:, None], [[1.0]] * 30, permutations=1)])[0].verdict == "worse" for row in lost]
    assert 0.73 <= np.mean(worse) <= 0.87
