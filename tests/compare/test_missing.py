"""What of BASE is missing in NEW: questions, samples, scores and figures, in every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.compare import baseline
from kvbench.compare.outcome import Outcome, compare
from kvbench.compare.policy import Policy
from kvbench.errors import UserError

NONE = Policy()
OTHER = {"method_source": "bbbb"}
FAILED = {"status": "nan_logits", "score": None, "score_partial": None}


def verdicts(outcome: Outcome) -> list[str]:
    return [one.verdict for one in outcome.judged]


def test_questions_that_were_not_asked(side, rows) -> None:
    outcome = compare(side("a", rows([1.0] * 24)), side("b", rows([1.0] * 3)), NONE)
    assert (verdicts(outcome), outcome.exit_code) == (["missing"], 4)
    assert "21 samples have a score in base but none in new" in outcome.judged[0].reasons[0]


def test_samples_that_were_not_drawn(side, rows) -> None:
    outcome = compare(side("a", rows([[1.0] * 4] * 24)), side("b", rows([[1.0]] * 24)), NONE)
    assert (verdicts(outcome), outcome.exit_code) == (["missing"], 4)


def test_a_cell_without_a_common_question(side, rows) -> None:
    base = side("a", rows([1.0] * 8), rows([1.0] * 8, method="h2o"))
    other = [row | {"doc_id": f"x{row['doc_id']}"} for row in rows([1.0] * 8)]
    outcome = compare(base, side("b", other, rows([1.0] * 8, method="h2o")), NONE)
    assert (verdicts(outcome), outcome.exit_code) == (["missing", "same"], 4)


def test_only_the_cells_of_an_unfinished_run_are_excused(side, rows) -> None:
    base = side("a", rows([1.0] * 8), rows([1.0] * 8, method="h2o"))
    new = side("b", rows([1.0] * 3), rows([1.0] * 3, method="h2o"))
    cells = {key: replace(cell, run="done") if key.method == "h2o" else cell for key, cell in new.cells.items()}
    outcome = compare(base, replace(new, cells=cells, unfinished={"b": "3 of 8 rows"}), NONE)
    assert {one.key.method: one.code for one in outcome.judged} == {"gkv": 0, "h2o": 4}


def test_failed_rows_of_an_unfinished_run_are_not_excused(side, rows) -> None:
    """Rows that were not run yet are. A failed row stays a loss if the new side is a baseline file."""
    base = side("a", rows([1.0] * 30), rows([1.0] * 30, method="h2o"))
    good, failed = rows([1.0] * 5), rows([1.0] * 5, **FAILED)
    for part in (failed, [*failed[:4], good[4]]):
        new = side("b", part, rows([1.0] * 5, method="h2o"), planned=60)
        outcome = compare(base, new, NONE)
        assert {one.key.method: one.verdict for one in outcome.judged} == {"gkv": "missing", "h2o": "undecided"}
        assert outcome.exit_code == 4
        lost = sum(row["score"] is None for row in part)
        assert f"{lost} samples have a score in base but none in new" in outcome.judged[0].reasons[0]
    waiting = rows([1.0] * 5, status="unscored", score=None, score_partial=None)
    new = side("c", [*good[:4], waiting[4]], rows([1.0] * 5, method="h2o"), planned=60)
    assert compare(base, new, NONE).exit_code == 0


def test_a_saved_side_keeps_its_failed_rows(side, rows, tmp_path) -> None:
    file = tmp_path / "new.json"
    new = side("b", [*rows([1.0] * 5, **FAILED)[:1], *rows([1.0] * 5)[1:]], planned=30)
    baseline.write(file, new)
    assert baseline.read(file).cells == new.cells
    assert compare(side("a", rows([1.0] * 30)), baseline.read(file), NONE).exit_code == 4


def two_seeds(rows, scores, **second) -> list:
    return [rows(scores, **OTHER), rows(scores, **OTHER | {"seed": 1} | second)]


def test_the_second_seed_is_judged_too(side, rows) -> None:
    scores = [1.0] * 8
    base = side("a", rows(scores), rows(scores, seed=1))
    failed = compare(base, side("b", *two_seeds(rows, scores, **FAILED)), NONE, stages=2)
    assert (verdicts(failed), failed.exit_code) == (["missing"], 4)
    raised = compare(base, side("c", *two_seeds(rows, scores, entries_after_evict=60.0)), NONE, stages=2)
    assert raised.exit_code == 5
    assert "entries after an eviction: 48 before, 60 now" in raised.judged[0].reasons


def test_a_cell_that_the_second_run_lost(side, rows) -> None:
    scores = [1.0] * 8
    names = ("gkv", "h2o")
    base = side("a", *(rows(scores, method=name, seed=seed) for name in names for seed in (0, 1)))
    first = [rows(scores, method=name) for name in names]
    assert compare(base, side("b", *first), NONE, stages=2).exit_code == 0
    outcome = compare(base, side("c", *first, rows(scores, seed=1)), NONE, stages=2)
    assert outcome.exit_code == 4
    assert [(one.key.method, one.key.seed) for one in outcome.judged if one.code] == [("h2o", "1")]


def test_a_third_seed_is_refused(side, rows) -> None:
    three = [rows([1.0] * 8, seed=seed) for seed in range(3)]
    with pytest.raises(UserError, match="--two-stage takes two seeds; gkv at 48 on walk has seeds 0, 1, 2"):
        compare(side("a", *three), side("b", *three), NONE, stages=2)


def scored_again(rows, fallen: int, count: int = 24, **changes) -> list:
    """The same answers, of which the first ones get another score."""
    made = rows([1.0] * count)
    return [row | changes if number < fallen else row for number, row in enumerate(made)]


def test_equal_answers_with_other_scores_are_not_the_same(side, rows) -> None:
    base = side("a", rows([1.0] * 24))
    fell = compare(base, side("b", scored_again(rows, 2, score=0.0, score_partial=0.0)), NONE)
    assert verdicts(fell) == ["undecided"]
    assert (
        compare(base, side("b", scored_again(rows, 2, score=0.0, score_partial=0.0)), Policy(strict=True)).exit_code
        == 5
    )
    lost = compare(base, side("c", scored_again(rows, 3, status="unscored", score=None, score_partial=None)), NONE)
    assert (verdicts(lost), lost.exit_code) == (["missing"], 4)


def test_two_runs_without_an_answer_are_not_the_same(side, rows) -> None:
    failed = rows([1.0] * 8, **FAILED)
    assert verdicts(compare(side("a", failed), side("b", failed), NONE)) == ["undecided"]


def test_a_limited_figure_that_is_unknown_is_missing(side, rows) -> None:
    policy = Policy(limits={"kv_bytes_peak": 1.1})
    base = side("a", rows([1.0] * 8))
    lost = compare(base, side("b", rows([1.0] * 8, kv_bytes_peak=None)), policy)
    assert (verdicts(lost), lost.exit_code) == (["missing"], 4)
    assert compare(side("c", rows([1.0] * 8, kv_bytes_peak=0)), base, policy).exit_code == 5


def test_a_limit_that_is_just_reached_passes(side, rows) -> None:
    base, new = side("a", rows([1.0] * 8, kv_bytes_peak=50_000)), side("b", rows([1.0] * 8, kv_bytes_peak=55_000))
    assert compare(base, new, Policy(limits={"kv_bytes_peak": 1.1})).exit_code == 0
    assert compare(base, new, Policy(limits={"kv_bytes_peak": 1.09})).exit_code == 5
