"""The first page: methods by tasks, the best methods per budget with those that tie, score against measured bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.report import stats
from kvbench.report.load import load
from kvbench.report.overview import frontier
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport

DRAW = random.Random(3)
FULL = [DRAW.choice([1.0, 0.9, 0.8]) for _ in range(30)]


def lowered(by: float, noise: float = 0.1) -> list[float]:
    return [max(0.0, score - by - noise * DRAW.random()) for score in FULL]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run(make_run: Callable, rows: Callable) -> Path:
    """gkv and rkv differ by noise, tova is far below; at 64 entries nothing is lost; chain has nothing to lose."""
    parts = [rows("full", None, FULL), rows("full", None, [0.0] * 30, task="chain", floor=None)]
    for budget, losses in ((48, (0.1, 0.1, 0.5)), (64, (0.0, 0.0, 0.0))):
        for place, (method, loss) in enumerate(zip(("gkv", "rkv", "tova"), losses)):
            bytes_ = {"kv_bytes_peak": budget * 1000 + place}
            parts += [
                rows(method, budget, lowered(loss), **bytes_),
                rows(method, budget, [0.0] * 30, task="chain", floor=0.0, **bytes_),
            ]
    return make_run("r1", *parts)


def test_methods_and_tasks_stand_in_one_table(run: Path) -> None:
    report = ScoreReport.make(load([run]))
    first = next(report.blocks())
    assert first.title == "Overview"
    cells = {(t.task, c.method, c.budget): c for t in report.tables for c in t.cells}
    (columns,) = first.tables()
    assert [column.header for column in columns] == ["method", "budget", "chain", "walk"]
    shown = {tuple(column.text(line) for column in columns[:2]): line for line in first.lines}
    assert list(shown) == [("full", "-"), *((m, str(b)) for b in (48, 64) for m in ("gkv", "rkv", "tova"))]
    for (method, budget), line in shown.items():
        for column in columns[2:]:
            cell = cells[column.header, method, int(budget) if budget != "-" else None]
            verdict = f" {cell.against.judged.verdict}" if cell.against else ""
            assert column.text(line) == f"{cell.score.mean:.3f}{verdict}"
    assert "0.000 cannot tell" in FORMATS["text"](report)


def test_the_best_at_a_budget_names_the_methods_that_tie(run: Path) -> None:
    report = ScoreReport.make(load([run]))
    best = {(table.task, one.leader.budget): one for table in report.tables for one in table.best}
    assert set(best) == {(task, budget) for task in ("chain", "walk") for budget in (48, 64)}
    near = best["walk", 48]
    assert {near.leader.method, *(cell.method for cell in near.rivals)} == {"gkv", "rkv"}
    assert near.compared == 2
    leader = max((c for t in report.tables if t.task == "walk" for c in t.cells if c.budget == 48), key=_score)
    assert near.leader is leader
    assert len(best["walk", 64].rivals) == 2
    assert best["walk", 64].told
    assert not best["chain", 48].told
    shown = FORMATS["markdown"](report)
    assert "cannot tell: floor or ceiling" in shown
    assert "all others" in shown


def _score(cell) -> float:
    return cell.score.mean


def test_too_few_questions_tell_no_methods_apart(make_run: Callable, rows: Callable) -> None:
    report = ScoreReport.make(load([make_run("r2", rows("gkv", 48, [1.0, 0.5]), rows("rkv", 48, [0.0, 0.5]))]))
    assert not report.tables[0].best[0].told
    assert "unknown: too few questions" in FORMATS["text"](report)


def test_rivals_are_those_that_a_test_does_not_put_below(make_run: Callable, rows: Callable) -> None:
    scores = {"gkv": lowered(0.0), "rkv": lowered(0.03), "tova": lowered(0.12), "h2o": lowered(0.3)}
    (table,) = ScoreReport.make(load([make_run("r2", *(rows(m, 48, s) for m, s in scores.items()))])).tables
    (best,) = table.best
    others = [name for name in scores if name != best.leader.method]
    pairs = [stats.paired([[s] for s in scores[name]], [[s] for s in scores[best.leader.method]]) for name in others]
    worse = {name for name, p, pair in zip(others, stats.holm([p.p for p in pairs]), pairs) if p <= 0.05}
    assert {cell.method for cell in best.rivals} == {*others} - worse
    assert worse


def test_the_best_is_best_on_the_questions_that_all_have(make_run: Callable, rows: Callable) -> None:
    """rkv answered the easy half alone: its own mean is the highest, though gkv beats it there."""
    easy, hard = [1.0 - 0.01 * (i % 3) for i in range(20)], [0.1] * 20
    cells = rows("gkv", 48, easy + hard) + rows("rkv", 48, [score - 0.2 for score in easy])
    (table,) = ScoreReport.make(load([make_run("r2", cells)])).tables
    (best,) = table.best
    assert best.leader.method == "gkv"
    assert best.rivals == []


def _beats(other, cell) -> bool:
    """Whether another cell scores as much with fewer bytes, or more with as few; of equals the first stays."""
    mine, its = ((c.score.mean, -c.kv_bytes_peak) for c in (cell, other))
    return its != mine and its[0] >= mine[0] and its[1] >= mine[1]


def test_the_frontier_has_no_cell_that_another_one_beats(run: Path) -> None:
    for table in ScoreReport.make(load([run])).tables:
        kept = frontier(table)
        assert kept
        for cell in table.cells:
            beaten = any(_beats(other, cell) for other in table.cells)
            assert any(cell is one for one in kept) != beaten
        means = [cell.score.mean for cell in kept]
        assert means == sorted(set(means))


def test_methods_that_bound_no_generated_entries_are_marked(make_run: Callable, rows: Callable) -> None:
    """Every table of the first page marks them, and a note explains the mark. JSON has the plain names."""
    near, far = [FULL[0] - 0.1, *FULL[1:]], [score - 0.5 for score in FULL]
    free = {"decode_bounded": False}
    parts = [rows("snapkv", 48, FULL, **free), rows("ada-kv", 48, near, **free), rows("tova", 48, far)]
    report = ScoreReport.make(load([make_run("r5", *parts)]), summary=True)
    [line] = [line for line in FORMATS["markdown"](report).splitlines() if line.startswith("| walk | 48 |")]
    assert line.startswith(r"| walk | 48 | snapkv \* |")
    assert line.endswith(r"| ada-kv \* |")
    assert "* generated entries are not bounded by the budget" in FORMATS["text"](report)
    [best] = json.loads(FORMATS["json"](report))["best"]
    assert (best["method"], best["rivals"]) == ("snapkv", ["ada-kv"])


def test_json_has_the_best_and_the_frontier(run: Path) -> None:
    document = json.loads(FORMATS["json"](ScoreReport.make(load([run]))))
    assert {"task", "budget", "budget_share", "method", "mean", "rivals", "told", "group"} == set(document["best"][0])
    assert {line["task"] for line in document["frontier"]} == {"chain", "walk"}
    assert all(line["kv_bytes_peak"] for line in document["frontier"])


def test_a_summary_is_the_first_page_alone(run: Path) -> None:
    short = ScoreReport.make(load([run]), summary=True)
    titles = ["Overview", "Best method per budget", "Frontier of score against measured bytes"]
    assert [block.title for block in short.blocks()] == titles
    whole = ScoreReport.make(load([run]))
    assert [block.title for block in whole.blocks()][:3] == titles
    assert len([*whole.blocks()]) == 5


def test_a_table_with_nothing_to_choose_from_has_no_first_page(make_run: Callable, rows: Callable) -> None:
    run = make_run("r3", rows("full", None, FULL), rows("gkv", 48, FULL))
    assert [block.title for block in ScoreReport.make(load([run])).blocks()] == ["walk, evicting every 32 tokens"]


def test_each_group_of_runs_has_its_own_first_page(make_run: Callable, rows: Callable) -> None:
    runs = [
        make_run(f"r{seed}", rows("full", None, FULL, seed=seed), rows("gkv", 48, FULL, seed=seed)) for seed in (1, 2)
    ]
    report = ScoreReport.make(load(runs, ["seed"]), summary=True)
    assert [b.title for b in report.blocks()] == [
        *("Overview, seed 1", "Frontier of score against measured bytes, seed 1"),
        *("Overview, seed 2", "Frontier of score against measured bytes, seed 2"),
    ]
