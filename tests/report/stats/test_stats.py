"""Statistics: recorded figures, hand calculations, and simulated error rates."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.folders import DATA, SHARED

from kvbench.report.stats import (
    estimate,
    holm,
    judge,
    maj_at_n,
    mean_pass_at_k,
    paired,
    pass_at_k,
    question_means,
    sign_flip,
    smallest_drop,
)
from kvbench.scoring.math import normalise_answer

GOLDENS = DATA / "goldens" / "passk_stats.jsonl"
WHOLE = SHARED / "goldens" / "open" / "passk_stats.jsonl"
ROWS = [json.loads(line) for line in (WHOLE if WHOLE.is_file() else GOLDENS).read_text(encoding="utf-8").splitlines()]


def golden(metric: str) -> list:
    return [pytest.param(row, id=row["id"]) for row in ROWS if row["metric"] == metric]


@pytest.mark.parametrize("row", golden("pass_at_k"))
def test_pass_at_k_goldens(row: dict):
    assert pass_at_k(row["n"], row["c"], row["k"]) == pytest.approx(row["expected"], abs=1e-12)


@pytest.mark.parametrize("row", golden("cluster_se"))
def test_standard_error_goldens(row: dict):
    found = estimate(row["scores"])
    assert found.mean == pytest.approx(row["mean"], abs=1e-12)
    assert found.se == pytest.approx(row["se_clustered"], abs=1e-12)
    if row["se_fixed_questions"] is None:
        assert math.isnan(found.se_fixed)
    else:
        assert found.se_fixed == pytest.approx(row["se_fixed_questions"], abs=1e-12)


@pytest.mark.parametrize("row", golden("paired_diff"))
def test_paired_goldens(row: dict):
    found = paired(row["scores_a"], row["scores_b"], permutations=100)
    assert found.diff == pytest.approx(row["mean_diff"], abs=1e-12)
    assert found.se == pytest.approx(row["se_paired"], abs=1e-12)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_draws(n: int, data: st.DataObject):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses(n: int, correct: int, k: int):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, correct, k)


def test_mean_pass_at_k():
    assert mean_pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 2) == pytest.approx(0.25)


def test_questions_weigh_the_same_whatever_their_samples():
    assert list(question_means([[1], [0, 0, 0]])) == [1.0, 0.0]
    assert estimate([[1], [0, 0, 0]]).mean == 0.5
    with pytest.raises(ValueError, match="no samples"):
        estimate([[1], []])


def test_clusters_of_equal_questions_count_once():
    scores = [[1.0], [1.0], [0.0], [0.0], [1.0], [1.0]]
    single = estimate([[1.0], [0.0], [1.0]])
    assert estimate(scores, clusters=["a", "a", "b", "b", "c", "c"]).se == pytest.approx(single.se)
    assert estimate(scores, clusters=range(6)) == estimate(scores)
    with pytest.raises(ValueError, match="cluster"):
        estimate(scores, clusters=["a"])


def test_interval_rules():
    def rule(scores: list) -> tuple[str, float, float]:
        e = estimate(scores)
        return e.rule, e.low, e.high

    name, low, high = rule([[0.0]] * 30)
    assert (name, low) == ("rule of three", 0.0)
    assert high == pytest.approx(3 / 30, rel=0.01)
    name, low, high = rule([[1.0, 1.0]] * 30)
    assert (name, high) == ("rule of three", 1.0)
    assert low == pytest.approx(1 - 3 / 30, rel=0.01)
    assert rule([[0.0]])[0] == rule([])[0] == "one question"
    for score in (0.5, 0.1):  # 0.1: the mean of thirty is rounded, and the standard error is not exactly 0
        name, low, high = rule([[score, score]] * 30)
        assert name == "rule of three"
        assert (low, high) == pytest.approx((score * 0.9, score + 0.1 * (1 - score)), rel=0.01)
        assert estimate([[score]] * 30).se == 0
    name, low, high = rule([[7.0]] * 30)
    assert (name, math.isnan(low), math.isnan(high)) == ("constant", True, True)
    assert rule([[1.0]] * 20 + [[0.0]] * 20)[0] == "wilson"
    assert rule([[1.0]] * 50 + [[0.0]] * 50)[0] == "t"
    assert rule([[1.0]] * 480 + [[0.0]] * 20)[0] == "wilson"
    assert rule([[1.0]] * 99 + [[0.0]])[0] == "beta"
    assert rule([[7.0], [3.0], [8.0]])[0] == "t"


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=2, max_size=60))
def test_intervals_hold_the_mean_and_stay_in_range(scores: list[list[int]]):
    found = estimate(scores)
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= 1


def test_interval_coverage():
    generator = np.random.default_rng(1)
    truth, hits = 0.6 / 1.1, 0
    for _ in range(400):
        p = generator.beta(0.6, 0.5, 30)
        found = estimate(generator.binomial(1, p[:, None], (30, 8)))
        hits += found.low <= truth <= found.high
    assert 0.92 <= hits / 400 <= 0.995


def null_tables(questions: int, samples: int, runs: int, seed: int):
    """Pairs of tables from the same question difficulties (AIME-like), so that every alarm is false."""
    generator = np.random.default_rng(seed)
    for _ in range(runs):
        p = generator.beta(0.6, 0.5, questions)[:, None]
        yield generator.binomial(1, p, (questions, samples)), generator.binomial(1, p, (questions, samples))


def test_false_alarms_are_as_announced():
    found = [paired(a, b, permutations=400) for a, b in null_tables(30, 8, 600, 2)]
    assert 0.025 <= np.mean([f.p < 0.1 and f.diff > 0 for f in found]) <= 0.075
    assert 0.025 <= np.mean([f.p < 0.05 for f in found]) <= 0.075
    assert np.mean([f.p_sign_flip < 0.05 for f in found]) <= 0.07


def test_a_drop_of_ten_points_is_found():
    generator = np.random.default_rng(3)
    alarms = 0
    for _ in range(100):
        logits = np.log((p := generator.beta(0.6, 0.5, 30)) / (1 - p))
        worse = 1 / (1 + np.exp(-(logits - 1.0)))
        a, b = (generator.binomial(1, q[:, None], (30, 32)) for q in (p, worse))
        alarms += paired(a, b, permutations=10).p < 0.05
    assert alarms >= 95


def test_identical_tables_give_one():
    scores = [[1, 0], [1, 1], [0, 0]]
    found = paired(scores, scores)
    assert (found.diff, found.p, found.p_sign_flip) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (1.0, 0.89), (0.3, 0.1 + 0.1)])
@pytest.mark.parametrize("questions", [6, 8])
def test_equal_differences_have_the_exact_p_of_the_sign_flips(a: float, b: float, questions: int):
    found = paired([[a] * 3] * questions, [[b] * 3] * questions)
    assert found.p == found.p_sign_flip == paired([[b]] * questions, [[a]] * questions).p == 2 / 2**questions


@pytest.mark.parametrize(("questions", "verdict"), [(2, "unknown"), (5, "unknown"), (6, "worse"), (7, "worse")])
def test_no_verdict_rests_on_fewer_questions_than_an_exact_test_needs(questions: int, verdict: str):
    """Differences that are nearly equal give t a tiny p from two questions on."""
    evicted = [[0.01 * number] for number in range(questions)]
    found = paired(evicted, [[1.0]] * questions)
    (judged,) = judge([found])
    assert judged.verdict == verdict
    assert (judged.p == 1.0) == math.isnan(found.low) == math.isnan(judged.smallest_drop) == (verdict == "unknown")


def test_differences_of_rounding_size_are_none():
    found = paired([[0.1 + 0.2]] * 3, [[0.3]] * 3)
    assert (found.p, found.p_sign_flip) == (1.0, 1.0)


def test_order_of_questions_does_not_matter():
    a, b = next(null_tables(30, 8, 1, 4))
    order = np.random.default_rng(0).permutation(30)
    one, two = paired(a, b), paired(a[order], b[order])
    assert one.p == pytest.approx(two.p)
    assert one.p_sign_flip == pytest.approx(two.p_sign_flip, abs=0.02)
    assert paired(a, b) == one  # the seed is fixed


def test_paired_t_by_hand():
    from scipy.stats import t as student

    found = paired([[1.0], [1.0], [1.0], [0.0], [1.0], [0.0]], [[0.0], [0.5], [1.0], [0.0], [1.0], [0.0]])
    diffs = [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    se = math.sqrt(sum((d - 0.25) ** 2 for d in diffs) / 5 / 6)
    assert (found.diff, found.df) == (0.25, 5)
    assert found.se == pytest.approx(se)
    assert found.p == pytest.approx(2 * student.sf(0.25 / se, 5))
    assert paired([[1.0]], [[0.0]]).p == 1.0
    with pytest.raises(ValueError, match="cannot be paired"):
        paired([[1.0]], [])


def test_sign_flip_by_hand():
    assert sign_flip([1.0, 1.0, 1.0]) == 2 / 8
    assert sign_flip([1.0, 1.0, -1.0]) == 1.0  # |1| is the least any signs give
    assert sign_flip([]) == sign_flip([0.0, 0.0]) == 1.0
    many = [0.1] * 40
    assert sign_flip(many, permutations=2000) == pytest.approx(1 / 2001)


def test_paired_clusters_flip_together():
    a, b = [[1.0]] * 6, [[0.0]] * 6
    assert paired(a, b, clusters=list("aabbcc")).p_sign_flip == 2 / 8
    assert paired(a, b, clusters=list("aabbcc")).df == 2


@pytest.mark.parametrize("alpha", [0.05, 0.1])
@pytest.mark.parametrize("family", [1, 8])
@pytest.mark.parametrize("df", [2, 5, 11, 29, 199])
def test_smallest_drop_is_that_of_the_noncentral_t(df: int, family: int, alpha: float):
    """For normal data, whose standard error is on average less than the true one by c4."""
    from scipy.stats import chi, nct
    from scipy.stats import t as student

    c4 = chi.mean(df) / math.sqrt(df)
    drop = smallest_drop(0.0155, df, alpha=alpha / family)
    found = nct.sf(student.isf(alpha / family / 2, df), df, drop / 0.0155 * c4)
    assert found == pytest.approx(0.8, abs=0.005)


def test_smallest_drop_without_spread_is_none():
    assert math.isnan(smallest_drop(math.nan, 0, alpha=0.05))
    drop = smallest_drop(0.1, 29, alpha=0.05)
    assert smallest_drop(0.1, 29, alpha=0.05, tail=0.05) > drop > 0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.02]) == [0.02]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_order_and_never_shrinks(ps: list[float]):
    adjusted = holm(ps)
    assert all(p <= q <= 1 for p, q in zip(ps, adjusted, strict=True))
    ranks = sorted(range(len(ps)), key=ps.__getitem__)
    assert all(adjusted[i] <= adjusted[j] for i, j in itertools.pairwise(ranks))


def test_majority():
    answers = [["25", "025", "7", None], ["1", "2", None, ""], [None, None, None, None]]
    scores = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert maj_at_n(answers, scores, same=normalise_answer) == pytest.approx(1 / 3)  # ties to the first: "1"
    assert maj_at_n(answers, scores) == pytest.approx(1 / 3)
