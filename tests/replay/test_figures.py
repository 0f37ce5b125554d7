"""Figures from losses that are known, and their errors against the closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.traces import traces

from kvbench.replay.comparison import TraceFigures
from kvbench.replay.figures import figures, jackknife


def read(losses, full, *, entropy=None, cluster=None):
    """Figures of one trace with these losses of its tokens."""
    [trace] = traces([(3, len(losses))])
    if cluster is not None:
        trace = type(trace)(request=trace.request, cluster=cluster)
    n = len(losses)
    return TraceFigures(
        trace=trace,
        loss=np.array(losses, dtype=float),
        loss_full=np.array(full, dtype=float),
        entropy=np.array(entropy if entropy is not None else range(n), dtype=float),
        divergence=np.full(n, 0.5),
        agrees=np.array([1.0] * (n - 1) + [0.0]),
        cosine=np.full((2, 4), 0.9 * (n - 1)),
        rows=n - 1,
        lost=0.25 * (n - 1),
        overlap=1.5,
        choices=2,
        entries=10.0 * (n - 1),
        most=12.0,
    )


def test_sums_run_over_tokens_not_traces():
    found = figures([read([4, 4], [1, 1], cluster="a"), read([1] * 6, [1] * 6, cluster="b")], None)
    assert found["traces"] == 2
    assert found["tokens"] == 8
    assert found["loss_ratio"] == pytest.approx(14 / 8)
    assert found["loss_increase"] == pytest.approx(6 / 8)
    assert found["kl"] == pytest.approx(0.5)
    assert found["top1"] == pytest.approx(6 / 8)
    assert found["cosine"] == pytest.approx(0.9)
    assert found["mass_lost"] == pytest.approx(0.25)
    assert found["overlap"] == pytest.approx(0.75)
    assert found["entries_mean"] == pytest.approx(10)
    assert found["entries_peak"] == 12
    assert found["gap_closed"] is None


def test_tokens_are_parted_by_the_full_caches_entropy():
    """The 80% of lowest entropy over all traces: here all of the first, and three of five of the second."""
    first = read([2] * 5, [1] * 5, entropy=[0] * 5, cluster="a")
    second = read([3, 3, 3, 9, 9], [1] * 5, entropy=[1, 2, 3, 8, 7], cluster="b")
    found = figures([first, second], None)
    assert found["loss_increase_low"] == pytest.approx((5 * 1 + 3 * 2) / 8)
    assert found["loss_increase_high"] == pytest.approx(8)
    assert found["loss_ratio_high"] == pytest.approx(9)


def test_the_gap_between_random_and_the_oracle():
    full = [1, 1]
    floor, oracle = [read([9, 9], full)], [read([1, 1], full)]
    assert figures([read([7, 3], full)], (floor, oracle))["gap_closed"] == pytest.approx(0.5)
    assert figures(floor, (floor, oracle))["gap_closed"] == 0
    assert figures(oracle, (floor, oracle))["gap_closed"] == 1
    assert figures(floor, (floor, floor))["gap_closed"] is None  # there is no gap


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = [0.1, 0.7, 0.4, 0.9, 0.2]
    sums = {"x": values, "n": [1] * 5}
    value, error = jackknife(sums, list(range(5)), lambda s: s["x"] / s["n"])
    assert value == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_the_jackknife_leaves_out_whole_clusters():
    """Copies of a trace add no information."""
    once = jackknife({"x": [1.0, 3.0, 2.0], "n": [1] * 3}, [0, 1, 2], lambda s: s["x"] / s["n"])
    twice = jackknife({"x": [1.0, 3.0, 2.0] * 2, "n": [1] * 6}, [0, 1, 2] * 2, lambda s: s["x"] / s["n"])
    assert twice == pytest.approx(once)


def test_the_error_of_a_ratio_is_that_of_repeated_draws():
    generator = np.random.default_rng(0)

    def draw():
        full = generator.gamma(4, size=60)
        return {"loss": full * generator.gamma(9, size=60) / 9 * 2, "full": full}

    def ratio(s):
        return s["loss"] / s["full"]

    found = [jackknife(draw(), list(range(60)), ratio) for _ in range(400)]
    spread = np.std([value for value, _ in found])
    assert np.mean([error for _, error in found]) == pytest.approx(spread, rel=0.12)


def test_what_cannot_be_had_is_none():
    [one] = [read([2, 2], [0, 0])]
    found = figures([one], None)
    assert found["loss_ratio"] is None
    assert found["loss"] == 2
    assert found["loss_se"] is None  # one question has no spread
