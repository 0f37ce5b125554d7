"""The one-sided test of a regression: exact cases, and its rates in simulation.

The bands are four standard errors wide at this number of tables; results/statistics/compare.md has 2,000 a line.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from support.simulate_regression import Design, rates

from kvbench.report.stats import both, regression

PAIRS = 400


def test_p_is_that_of_the_one_sided_t_test() -> None:
    draw = np.random.default_rng(0)
    base, new = draw.random((20, 3)), draw.random((20, 3))
    for old, now in ((base, new), (new, base)):
        found = regression(old, now)
        assert found.p == pytest.approx(scipy_stats.ttest_rel(now.mean(1), old.mean(1), alternative="less").pvalue)
        both_sides = scipy_stats.ttest_rel(now.mean(1), old.mean(1)).confidence_interval(0.9)
        assert found.paired.low == pytest.approx(both_sides.low)
        assert found.low <= found.paired.low


def test_sign_flips_are_exact_and_one_sided() -> None:
    found = regression([[1.0]] * 6 + [[0.0]] * 4, [[0.0]] * 6 + [[0.0]] * 4)
    assert found.p_sign_flip == pytest.approx(1 / 2**6)


@pytest.mark.parametrize("questions", [1, 4, 5, 30])
def test_identical_tables_have_p_1(questions: int) -> None:
    found = regression([[1.0, 0.0]] * questions, [[1.0, 0.0]] * questions)
    assert (found.p, found.p_sign_flip, found.diff) == (1.0, 1.0, 0.0)


def test_below_five_questions_there_is_no_test() -> None:
    few = regression([[1.0]] * 4, [[0.0]] * 4)
    assert few.p == 1.0
    assert math.isnan(few.low)
    assert regression([[1.0]] * 5, [[0.0]] * 5).p == pytest.approx(1 / 2**5)


@pytest.mark.parametrize(("new", "low"), [(1.0, -0.1), (0.5, -0.55), (0.0, -1.0)])
def test_the_bound_of_equal_differences_is_the_rule_of_three(new: float, low: float) -> None:
    """A drop on a share s of all questions is missed by 30 questions with probability exp(-30 s): 5% at s = 0.1."""
    found = regression([[1.0]] * 30, [[new]] * 30)
    assert found.low == pytest.approx(low, abs=1e-3)
    tokens = regression([[250.0]] * 30, [[250.0]] * 30)
    assert tokens.low == 0  # a count has no largest difference that unseen questions could have


def test_the_bound_is_lower_where_few_questions_fall_far() -> None:
    fell = regression([[1.0]] * 30, [[0.0]] * 2 + [[1.0]] * 27 + [[0.9]])
    rose = regression([[0.0]] * 30, [[1.0]] * 2 + [[0.0]] * 27 + [[0.1]])
    assert fell.low < fell.paired.low
    assert rose.low < rose.paired.low


@pytest.mark.parametrize("questions", [6, 24, 500, 1319])
def test_the_bound_of_lost_answers_is_exact_and_falls(questions: int) -> None:
    lost = range(1, min(questions, 20))
    lows = [regression([[1.0]] * questions, [[0.0]] * f + [[1.0]] * (questions - f), permutations=2).low for f in lost]
    exact = [-scipy_stats.beta.ppf(0.95, f + 1, questions - f) for f in lost]
    assert lows == pytest.approx(exact, abs=1e-5)
    assert lows == sorted(lows, reverse=True)
    few = [[1.0, 1.0, 1.0, 0.0]] * questions  # one of four samples is lost, of more and more questions
    quarters = [regression([[1.0] * 4] * questions, few[:f] + [[1.0] * 4] * (questions - f)).low for f in lost]
    assert questions < 30 or quarters == sorted(quarters, reverse=True)


def test_the_bound_holds_where_few_questions_change_in_both_directions() -> None:
    """Of 60 questions f are lost and g won: a table of bounds, and the probability of those above the true mean."""
    lost, won = np.meshgrid(np.arange(16), np.arange(10), indexing="ij")
    bounds = np.array([
        regression([[1.0]] * (60 - g) + [[0.0]] * g, [[0.0]] * f + [[1.0]] * (60 - f), permutations=2).low
        for f, g in zip(lost.flat, won.flat)
    ]).reshape(lost.shape)  # fmt: skip
    for loses, wins in ((2, 0.5), (3, 0), (3.5, 0.5), (4, 1), (5, 0.2), (6, 2)):
        chances = (loses / 60, wins / 60, 1 - (loses + wins) / 60)
        seen = scipy_stats.multinomial.pmf(np.stack([lost, won, 60 - lost - won], -1), 60, chances)
        assert seen[bounds > chances[1] - chances[0] + 1e-9].sum() <= 0.05


@pytest.mark.parametrize(("a", "b", "samples", "drop"), [(0.3, 9, 2, 0.01), (9, 0.3, 2, 0.02), (9, 0.3, 32, 0.02)])
def test_the_bound_holds_near_0_and_1(a: float, b: float, samples: int, drop: float) -> None:
    """Every question falls by the same share of its score, or of its distance to 0."""
    draw, above = np.random.default_rng(4), 0
    for _ in range(PAIRS):
        base = draw.beta(a, b, 30)
        scores = (draw.binomial(1, p[:, None], (30, samples)) for p in (base, base * (1 - drop * (a + b) / a)))
        above += regression(*scores, permutations=2).low > -drop
    assert above / PAIRS <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / PAIRS)


def test_two_stages_have_the_level_of_one() -> None:
    p = np.random.default_rng(0).random((2, 100_000))
    assert np.mean(np.maximum(*p) ** 2 <= 0.05) == pytest.approx(0.05, abs=0.003)
    assert both(0.1, 0.2) == pytest.approx(0.04)


def test_rates_without_a_drop() -> None:
    found = rates(Design(30, 32), PAIRS, np.random.default_rng(1))
    assert 0.015 <= found.alarms <= 0.095
    assert 0.015 <= found.two_stages <= 0.095
    assert found.passed > 0.75  # no worse than 5 points


def test_rates_with_a_drop_of_five_points() -> None:
    found = rates(Design(30, 32, drop=0.05), PAIRS, np.random.default_rng(2))
    assert found.alarms >= 0.85
    assert found.two_stages >= 0.95
    assert found.passed <= 0.094  # no worse than the true drop: 5%


def test_the_printed_drop_is_found_with_80_percent_power() -> None:
    found = rates(Design(30, 32, drop=0.043), PAIRS, np.random.default_rng(3))
    assert 0.72 <= found.alarms <= 0.88
    assert found.printed == pytest.approx(0.043, abs=0.003)
