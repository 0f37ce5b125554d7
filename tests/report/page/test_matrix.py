"""The matrix of paired differences: the report's own test, for every pair, with Holm over the task."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.eviction.budget import named
from kvbench.report import stats
from kvbench.report.load import load
from kvbench.report.page import matrix, scored
from kvbench.report.scores import ScoreReport


@pytest.fixture
def walk(run: Path) -> scored.Scored:
    return next(one for one in scored.read(ScoreReport.make(load([run]))) if one.title == "walk")


def test_the_first_column_is_the_comparison_of_the_report(walk: scored.Scored) -> None:
    for at in matrix.matrices(walk):
        for cell in walk.table.cells:
            if cell.against and named(cell.budget) == at.budget:
                pair = at.between(cell.method, "full")
                assert pair is not None
                assert pair.diff == pytest.approx(cell.against.paired.diff)
                assert (pair.low, pair.high) == pytest.approx((cell.against.paired.low, cell.against.paired.high))


def test_a_pair_read_backwards_has_the_other_sign(walk: scored.Scored) -> None:
    at = matrix.matrices(walk)[0]
    there, back = at.between("gkv", "random"), at.between("random", "gkv")
    assert there is not None
    assert back is not None
    assert (back.diff, back.low, back.high, back.p) == (-there.diff, -there.high, -there.low, there.p)
    assert (there.verdict, back.verdict) == ("better", "worse")
    assert at.between("gkv", "gkv") is None


@pytest.mark.parametrize(
    ("diff", "text"), [(-0.25, "-0.25"), (0.005, "+0.01"), (-0.0047, "-0.005"), (-0.0001, "+0.000"), (0.0, "+0.000")]
)
def test_a_small_difference_is_not_shown_as_0(diff: float, text: str) -> None:
    assert matrix.Difference(diff, diff, diff, 0.01, "worse", 10).brief == text


def test_a_pair_without_budgets_counts_once(make_run: Callable[..., Path], rows: Callable[..., Any]) -> None:
    full = [1.0] * 20
    cells = [rows("full", None, full), rows("duo", None, [0.0] * 5 + full[5:], decode_bounded=False)]
    cells += [rows("gkv", budget, [0.0] * 7 + full[7:]) for budget in (48, 64, 96)]
    [one] = scored.read(ScoreReport.make(load([make_run("r", *cells)])))
    found = matrix.matrices(one)
    assert [at.family for at in found] == [1 + 3 * 2] * 3
    assert len({at.between("duo", "full") for at in found}) == 1


def test_holm_is_over_all_pairs_of_the_task(walk: scored.Scored) -> None:
    both = matrix.matrices(walk)
    assert [at.budget for at in both] == ["48", "64"]
    assert {at.family for at in both} == {12}
    raw = []
    for at in both:
        for a, b in at.pairs:
            cells = [next(c for c in walk.cells if c[0] == name and c[1] in ("-", at.budget)) for name in (a, b)]
            first, second = (walk.cells[cell] for cell in cells)
            raw.append(stats.paired([first[q] for q in first], [second[q] for q in first]).p)
    adjusted = [d.p for at in both for d in at.pairs.values()]
    assert adjusted == pytest.approx(stats.holm(raw))
    assert not any(math.isnan(p) for p in adjusted)
