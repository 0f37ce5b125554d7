"""Lines about what comparisons could have found, and numbers that do not claim more than the data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.report import stats
from kvbench.report.blocks import difference, with_error, with_interval
from kvbench.report.load import load
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import TaskTable, make_tables

DRAW = random.Random(1)
BASE = [DRAW.choice([1.0, 0.9, 0.8]) for _ in range(30)]


def near(amount: float) -> list[float]:
    return [max(0.0, score - amount * DRAW.random()) for score in BASE]


def one(path: Path) -> TaskTable:
    (table,) = make_tables(load([path]))
    return table


def test_the_printed_drop_is_that_of_the_printed_verdict(make_run: Callable, rows: Callable) -> None:
    methods = ("gkv", "rkv", "tova", "h2o")
    table = one(make_run("r1", rows("full", None, BASE), *(rows(m, 48, near(0.1)) for m in methods)))
    found = [c.against.paired for c in table.cells if c.against]
    drops = [stats.smallest_drop(one.se, 29, alpha=0.05 / 4, tail=one.tail) for one in found]
    assert [c.against.judged.smallest_drop for c in table.cells if c.against] == pytest.approx(drops)
    (line,) = [note for note in table.notes if "80% power" in note]
    assert line == (
        f"A true drop of {max(drops):.3f} is found with 80% power in every comparison: verdict worse, two-sided at 5% "
        "after Holm over 4, if only that method drops."
    )


def test_tables_of_zeros_say_that_nothing_could_be_seen(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("full", None, [0.0] * 30), rows("gkv", 48, [0.0] * 30), rows("rkv", 48, [0.0] * 30))
    (line,) = [note for note in one(run).notes if "80% power" in note]
    assert line.startswith("2 comparisons have too little room for a drop: full scores 0.000, and only a drop of 0.")
    shown = FORMATS["markdown"](ScoreReport.make(load([run])))
    assert "0.000 (0, 0.100)" in shown
    assert "±0.000" not in shown
    assert "+0.000 (-0.10, +0.10) | cannot tell p=1.000" in shown
    assert "tied" not in shown


def test_a_tie_at_the_task_s_floor_is_no_tie(make_run: Callable, rows: Callable) -> None:
    """Scores of 0.2 are far from 0, and at the floor of a task that gives 0.2 before the first eviction."""
    noisy = [0.2 + 0.1 * (DRAW.random() - 0.5) for _ in range(30)]
    run = make_run("r1", rows("full", None, [0.2] * 30), rows("gkv", 48, noisy, floor=0.19))
    assert [c.against.judged.verdict for c in one(run).cells if c.against] == ["cannot tell"]
    (line,) = [note for note in one(run).notes if "too little room for a drop" in note]
    assert line.startswith(
        "1 comparison has too little room for a drop: full scores 0.200, 0.010 above the floor, and only a drop of"
    )
    low = make_run("r2", rows("full", None, [0.2] * 30), rows("gkv", 48, noisy, floor=0.0))
    assert [c.against.judged.verdict for c in one(low).cells if c.against] == ["tied"]


def test_ties_at_the_ceiling_of_all_methods_are_no_ties(make_run: Callable, rows: Callable) -> None:
    best, good = [1.0] * 30, [1.0] * 29 + [0.9]
    run = make_run("r1", rows("full", None, best), rows("gkv", 48, best), rows("rkv", 48, good))
    assert [c.against.judged.verdict for c in one(run).cells if c.against] == ["cannot tell", "cannot tell"]
    (line,) = [note for note in one(run).notes if "ceiling" in note]
    assert line.startswith("All scores are at the ceiling: at least 0.997, closer to 1 than")
    seen = make_run("r2", rows("full", None, best), rows("gkv", 48, best), rows("rkv", 48, [0.0] * 15 + best[15:]))
    assert [c.against.judged.verdict for c in one(seen).cells if c.against] == ["tied", "worse"]


def test_nothing_compared_is_said(make_run: Callable, rows: Callable) -> None:
    two = one(make_run("r1", rows("gkv", 48, BASE), rows("rkv", 48, BASE)))
    assert any(note.startswith("Nothing is compared") for note in two.notes)
    alone = one(make_run("r2", rows("gkv", 48, BASE)))
    assert not any(note.startswith("Nothing is compared") for note in alone.notes)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (-0.03, 0.05, "+0.010 (-0.03, +0.05)"),
        (-0.004, 0.003, "+0.010 (-0.004, +0.003)"),
        (-0.0004, 0.0003, "+0.010 (-0.0004, +0.0003)"),
        (float("nan"), float("nan"), "+0.010"),
    ],
)
def test_an_interval_is_never_rounded_to_a_point(low: float, high: float, shown: str) -> None:
    assert difference(0.01, low, high) == shown


def test_an_error_is_never_rounded_to_zero() -> None:
    assert [with_error(0.5, se) for se in (0.0341, 0.0005, 0.00042, float("nan"))] == [
        "0.500 ±0.034",
        "0.500 ±0.001",
        "0.500 ±0.0004",
        "0.500",
    ]


def test_a_whole_loss_has_an_interval(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("full", None, [1.0] * 30), rows("gkv", 48, [0.0] * 30))
    shown = FORMATS["markdown"](ScoreReport.make(load([run])))
    assert "1.000 (0.900, 1)" in shown
    assert "-1.000 (-1.00, -0.80)" in shown


@pytest.mark.parametrize(("sources", "questions"), [(2, 2), (5, 5), (5, 40)])
def test_a_few_questions_give_no_verdict(make_run: Callable, rows: Callable, sources: int, questions: int) -> None:
    """Methods that nearly always differ by the same get a tiny p of t, from two questions on."""
    full, mine = (
        [row | {"cluster_id": f"c{n % sources}"} for n, row in enumerate(rows(m, b, scores))]
        for m, b, scores in (
            ("full", None, [1.0] * questions),
            ("gkv", 48, [n / 1000 for n in range(questions)]),
        )
    )
    run = make_run("r1", full, mine)
    assert [cell.against.judged.verdict for cell in one(run).cells if cell.against] == ["unknown"]
    assert [note for note in one(run).notes if "verdict" in note] == [
        f"1 comparison has the verdict unknown: {sources} questions (questions of one source count once) are fewer "
        "than the 6 with which an exact test can reach 5%."
    ]
    shown = FORMATS["markdown"](ScoreReport.make(load([run])))
    assert "| unknown |" in shown
    assert "worse" not in shown


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([40] + [2] * 10, "11 clusters, the largest with 40 of 60 questions: t would have 2.1 effective degrees"),
        ([5] * 4 + [3] * 4, "8 clusters, the largest with 5 of 32 questions: standard errors are CR2 and t has 6."),
        ([2] * 10, ""),
    ],
    ids=str,
)
def test_the_correction_for_unequal_clusters_is_named(
    make_run: Callable, rows: Callable, sizes: list[int], words: str
) -> None:
    clusters = [f"c{number}" for number, size in enumerate(sizes) for _ in range(size)]
    full, mine = (
        [row | {"cluster_id": c} for row, c in zip(rows(m, b, [DRAW.random() for _ in clusters]), clusters)]
        for m, b in (("full", None), ("gkv", 48))
    )
    notes = [note for note in one(make_run("r1", full, mine)).notes if "clusters" in note]
    assert [note[: len(words)] for note in notes] == ([words] if words else [])


def test_an_interval_near_its_share_has_digits_enough() -> None:
    assert with_interval(0.0, 0.0, 0.0004) == "0.000 (0, 0.0004)"
    assert with_interval(1.0, 0.99996, 1.0) == "1.000 (0.99996, 1)"
    assert with_interval(0.0, 0.0, 0.125) == "0.000 (0, 0.125)"
    assert with_interval(0.5, 0.5, 0.5) == with_interval(0.5, math.nan, math.nan) == "0.500"
