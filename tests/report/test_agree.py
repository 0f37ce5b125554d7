"""Rows that may stand in one table though they differ: what mixes is said, with counts, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.report.categories import CategoryReport
from kvbench.report.load import load
from kvbench.report.memory import MemoryReport
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import make_tables

SCORES = [1.0, 0.5, 0.25, 1.0]
OLD = {"kvbench_version": "0.1.0", "torch_version": "2.12.0", "transformers_version": "5.2.0", "device": "cpu"}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("change", "words", "counts"),
    [
        ({"torch_version": "2.13.0"}, "versions of torch", {"2.12.0": 4, "2.13.0": 4}),
        ({"kvbench_version": "0.2.0"}, "versions of kvbench", {"0.1.0": 4, "0.2.0": 4}),
        ({"transformers_version": "5.17.0"}, "versions of transformers", {"5.2.0": 4, "5.17.0": 4}),
        ({"device": "NVIDIA H200"}, "devices", {"cpu": 4, "NVIDIA H200": 4}),
    ],
)
def test_f26_a_report_says_which_versions_mix(
    make_run: Callable, rows: Callable, change: dict[str, Any], words: str, counts: dict[str, int]
) -> None:
    parts = rows("full", None, SCORES, **OLD), rows("gkv", 48, SCORES, **OLD | change)
    runs = [make_run(f"r{i}", [row | {"category": row["doc_id"]} for row in part]) for i, part in enumerate(parts)]
    listed = " and ".join(f"{value} ({count} rows)" for value, count in sorted(counts.items()))
    for kind in (ScoreReport, MemoryReport, CategoryReport):
        report = kind.make(load(runs))
        for name in ("text", "markdown"):
            shown = FORMATS[name](report).replace("\\", "")
            assert f"walk: rows of two {words}, {listed}." in shown
        (mixed,) = json.loads(FORMATS["json"](report))["mixed"]
        (column,) = change
        assert mixed == {"tasks": ["walk"], "column": column, "method": None, "rows": counts}


def test_equal_rows_say_nothing(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("full", None, SCORES, slots=8, **OLD), rows("gkv", 48, SCORES, slots=16, **OLD))
    report = ScoreReport.make(load([run]))
    assert "mixed" not in json.loads(FORMATS["json"](report))
    assert not any("rows of two" in FORMATS[name](report) for name in ("text", "markdown"))


def test_slots_are_compared_within_a_cell(make_run: Callable, rows: Callable) -> None:
    halved = [row | {"slots": 8 if i else 16} for i, row in enumerate(rows("gkv", 48, SCORES))]
    loaded = load([make_run("r1", rows("full", None, SCORES, slots=4), halved)])
    ((mixture, tasks),) = loaded.mixed
    assert (mixture.column, mixture.method, mixture.counts, tasks) == ("slots", "gkv", {"16": 1, "8": 3}, ["walk"])
    assert "walk: rows of two numbers of slots of gkv, 16 (1 row) and 8 (3 rows)." in FORMATS["text"](
        ScoreReport.make(loaded)
    )


def test_tasks_that_mix_the_same_share_a_line(make_run: Callable, rows: Callable) -> None:
    parts = [rows(m, b, SCORES, task=task, torch_version=v) for task in ("walk", "chain") for m, b, v in
             (("full", None, "2.12.0"), ("gkv", 48, "2.13.0"))]  # fmt: skip
    ((mixture, tasks),) = load([make_run("r1", *parts)]).mixed
    assert (mixture.counts, tasks) == ({"2.12.0": 8, "2.13.0": 8}, ["chain", "walk"])


# --- two runs of the same rows


def test_rows_that_an_earlier_run_has_are_left_out_and_this_is_said(make_run: Callable, rows: Callable) -> None:
    today, yesterday = (make_run(n, rows("gkv", 48, SCORES)) for n in ("today", "yesterday"))
    more = [row | {"row_key": f"new{i}", "doc_id": f"n{i}"} for i, row in enumerate(rows("gkv", 48, SCORES))]
    loaded = load([today, yesterday, make_run("more", more)])
    assert loaded.notices == [
        "4 rows of yesterday left out: today has them too (equal row keys), and a row counts once. "
        "Report the runs one by one."
    ]
    assert make_tables(loaded)[0].cells[0].samples == 8


def test_rows_that_many_runs_share_are_one_line(make_run: Callable, rows: Callable) -> None:
    runs = [make_run(f"r{n}", rows("gkv", 48, SCORES)) for n in range(7)]
    other = [make_run(f"s{n}", rows("gkv", 64, SCORES)) for n in range(2)]
    (line,) = load([*runs, *other]).notices
    assert line == (
        "28 rows of r1, r2, r3, r4 and 3 more left out: r0, s0 have them too (equal row keys), and a row counts once. "
        "Report the runs one by one."
    )


def test_a_failed_row_that_another_run_has_is_left_out_and_this_is_said(make_run: Callable, rows: Callable) -> None:
    bad = [row | {"status": "oom", "score": None, "score_partial": None} for row in rows("gkv", 48, SCORES)[:1]]
    loaded = load([make_run("r1", bad), make_run("r2", rows("gkv", 48, SCORES))])
    assert [notice[:40] for notice in loaded.notices] == ["1 row of r1 left out: r2 has them too (e"]


# --- plug-ins and versions of a method


def edited(make_run: Callable, rows: Callable) -> list[Path]:
    """Two runs of one plug-in, edited between them; the full cache in both."""
    runs = []
    for name, digest in (("r1", "3f2a9c01"), ("r2", "77aa01de")):
        used = {"artefacts": {"plug-in mine": digest, "draft tiny": "same"}}
        own = [row | {"row_key": f"{name}{i}"} for i, row in enumerate(rows("mine", 48, SCORES, **used))]
        runs.append(make_run(name, own, rows("full", None, SCORES)))
    return runs


def test_an_edited_plug_in_is_named_in_words(make_run: Callable, rows: Callable) -> None:
    with pytest.raises(UserError) as error:
        load(edited(make_run, rows))
    assert str(error.value) == (
        "the tables, drafts or plug-in of mine differ: plug-in mine 3f2a9c01 in r1 and plug-in mine 77aa01de in r2; "
        "scores are not comparable. Report the runs one by one."
    )


def test_a_report_of_all_runs_puts_them_apart(make_run: Callable, rows: Callable) -> None:
    tables = make_tables(load(edited(make_run, rows), split=True))
    assert [(t.group, [c.method for c in t.cells]) for t in tables] == [
        ("plug-in mine 3f2a9c01", ["full", "mine"]),
        ("plug-in mine 77aa01de", ["full", "mine"]),
    ]


def test_versions_and_judges_are_put_apart_too(make_run: Callable, rows: Callable) -> None:
    versions = rows("gkv", 48, SCORES), rows("gkv", 64, SCORES, method_version="2")
    judged = (
        rows("gkv", 48, SCORES, task="chain", judge="a 2026-01-01"),
        rows("gkv", 64, SCORES, task="chain", judge="b"),
    )
    runs = [make_run(f"r{i}", *pair) for i, pair in enumerate(zip(versions, judged))]
    with pytest.raises(UserError, match="not comparable"):
        load(runs)
    groups = [(t.task, t.group) for t in make_tables(load(runs, split=True))]
    assert groups == [("chain", "judge a"), ("chain", "judge b"), ("walk", "gkv version 1"), ("walk", "gkv version 2")]
