"""The random stream: fixed values, honest ranges, no repeats in a sample."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbench.taskkit.synthetic.draw import Draw


def test_the_stream_is_fixed():
    draw = Draw("walk", 7)
    assert [draw.below(1000) for _ in range(6)] == [536, 685, 78, 329, 318, 583]


def test_ranges():
    draw = Draw(0)
    assert {draw.below(3) for _ in range(200)} == {0, 1, 2}
    assert {draw.between(3, 5) for _ in range(200)} == {3, 4, 5}


def test_weighted_follows_the_shares():
    draw = Draw(1)
    counts = Counter(draw.weighted({"a": 3.0, "b": 1.0, "c": 0.0}) for _ in range(4000))
    assert counts["c"] == 0
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_sample_and_shuffle():
    draw = Draw(2)
    assert sorted(draw.shuffled(range(20))) == list(range(20))
    assert len(set(draw.sample(range(50), 30))) == 30
    with pytest.raises(ValueError, match="cannot draw 3"):
        draw.sample("ab", 3)
