"""Scores by category: parts, maps of lengths, formats."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable

import pytest

from kvbench.errors import UserError
from kvbench.report.blocks import Block
from kvbench.report.categories import CategoryReport
from kvbench.report.load import load
from kvbench.report.render import FORMATS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def sorted_rows(rows: list[dict], categories: list[str]) -> list[dict]:
    return [row | {"category": categories[i % len(categories)]} for i, row in enumerate(rows)]


def across(table: Block) -> list[str]:
    """The titles of the columns of scores, which follow the category and the number of questions."""
    return [column.header for grid in table.grids for column in grid[2:]]


def test_parts_of_a_category_have_tables_of_their_own(make_run: Callable, rows: Callable):
    """math500: level/subject. Scores are 1 where the level is 1."""
    names = ["1/Algebra", "2/Algebra", "1/Geometry", "2/Geometry"]
    made = [sorted_rows(rows(m, b, [1.0, 0.0] * 8, task="math500"), names) for m, b in (("full", None), ("gkv", 48))]
    report = CategoryReport.make(load([make_run("r1", *made)]))
    levels, subjects = report.tables
    assert (levels.title, subjects.title) == ("math500 by category, part 1 of 2", "math500 by category, part 2 of 2")
    assert across(levels) == ["full", "gkv 48"]
    found = {name: {m: (c.score.mean, c.score.questions) for m, c in line.items()} for name, line in levels.lines}
    assert found == {
        "1": {"full": (1.0, 8), "gkv 48": (1.0, 8)},
        "2": {"full": (0.0, 8), "gkv 48": (0.0, 8)},
    }
    assert [name for name, _ in subjects.lines] == ["Algebra", "Geometry"]
    assert all(cell.score.mean == 0.5 for _, line in subjects.lines for cell in line.values())


def test_the_slash_of_a_name_parts_nothing(make_run: Callable, rows: Callable):
    made = sorted_rows(rows("full", None, [1.0, 0.0] * 4, task="gsm8k"), ["TCP/IP", "HTTP"])
    (table,) = CategoryReport.make(load([make_run("r1", made)])).tables
    assert [name for name, _ in table.lines] == ["HTTP", "TCP/IP"]


def test_several_lengths_make_a_map_for_each_method(make_run: Callable, rows: Callable):
    made = [
        sorted_rows(rows(m, b, [s, 1.0] * 4, task=f"niah@{length}"), ["depth 000%", "depth 100%"])
        for m, b in (("full", None), ("gkv", 48))
        for length, s in ((8192, 0.0), (1024, 1.0))
    ]
    tables = CategoryReport.make(load([make_run("r1", *made)])).tables
    assert [t.title for t in tables] == ["niah by category, full", "niah by category, gkv 48"]
    assert [across(t) for t in tables] == [["@1024", "@8192"]] * 2
    top = dict(tables[0].lines)["depth 000%"]
    assert [top[length].score.mean for length in across(tables[0])] == [1.0, 0.0]


def test_a_method_that_bounds_no_generated_entries_is_marked(make_run: Callable, rows: Callable):
    """Even in a category whose rows do not say so; CSV has the plain name."""
    cells = {"gkv": True, "snapkv": False}
    made = [
        sorted_rows(rows(m, 48, [1.0, 0.0] * 4, task="gsm8k", decode_bounded=b), ["a", "b"]) for m, b in cells.items()
    ]
    made[1] = [row | ({"decode_bounded": None} if row["category"] == "b" else {}) for row in made[1]]
    report = CategoryReport.make(load([make_run("r1", *made)]))
    (table,) = report.tables
    assert across(table) == ["gkv 48", "snapkv * 48"]
    shown = FORMATS["text"](report)
    assert "snapkv * 48" in shown
    assert "* generated entries are not bounded" in shown
    assert {row["method"] for row in csv.DictReader(io.StringIO(FORMATS["csv"](report)))} == {"gkv", "snapkv"}


def test_questions_of_one_source_share_their_error(make_run: Callable, rows: Callable):
    plain = sorted_rows(rows("full", None, [1.0, 1.0, 0.0, 0.0] * 4, task="gsm8k"), ["a"])
    plain += [row | {"category": "b", "doc_id": f"b{row['doc_id']}", "row_key": f"b{i}"} for i, row in enumerate(plain)]
    twins = [row | {"cluster_id": f"c{i // 2}"} for i, row in enumerate(plain)]
    errors = []
    for name, made in (("r1", plain), ("r2", twins)):
        (table,) = CategoryReport.make(load([make_run(name, made)])).tables
        errors.append(dict(table.lines)["a"]["full"].score.se)
    assert errors[1] > errors[0] * 1.3


def test_formats_agree(make_run: Callable, rows: Callable):
    made = [
        sorted_rows(rows(m, b, [1.0, 0.25, 0.5] * 4), ["<b>|easy", "hard"])
        for m, b in (("full", None), *((m, b) for m in ("gkv", "tova", "rkv") for b in (48, 64)))
    ]
    report = CategoryReport.make(load([make_run("r1", *made)]))
    table = list(csv.DictReader(io.StringIO(FORMATS["csv"](report))))
    document = json.loads(FORMATS["json"](report))
    assert len(table) == len(document["cells"]) == 2 * 7
    assert [float(row["mean"]) for row in table] == [cell["mean"] for cell in document["cells"]]
    assert {cell["headline"] for cell in document["cells"]} == {"score_partial"}
    for name in ("text", "markdown"):
        shown = FORMATS[name](report)
        assert all(f"{cell['mean']:.3f}" in shown for cell in document["cells"])
        assert "gkv 64" in shown
        assert ("<b>" in shown) == (name == "text")


def test_failed_rows_have_no_score(make_run: Callable, rows: Callable):
    made = sorted_rows(rows("full", None, [1.0, 0.0] * 4, task="gsm8k"), ["a", "b"])
    made = [row | ({"status": "oom", "score": None} if row["category"] == "b" else {}) for row in made]
    report = CategoryReport.make(load([make_run("r1", made)]))
    assert [json.loads(FORMATS["json"](report))["cells"][i]["mean"] for i in (0, 1)] == [1.0, None]


def test_tasks_without_categories_are_left_out(make_run: Callable, rows: Callable):
    plain, one = rows("full", None, [1.0] * 4), sorted_rows(rows("full", None, [1.0] * 4, task="chain"), ["only"])
    run = make_run("r1", plain, one)
    with pytest.raises(UserError, match="no task of these runs has more than one category"):
        CategoryReport.make(load([run]))
    two = sorted_rows(rows("full", None, [1.0] * 4, task="gsm8k"), ["a", "b"])
    report = CategoryReport.make(load([run, make_run("r2", two)]))
    assert {cell.task for cell in report.cells} == {"gsm8k"}


def test_the_command(make_run: Callable, rows: Callable, kvbench: Callable, tmp_path):
    run = make_run("r1", sorted_rows(rows("full", None, [1.0, 0.0] * 4, task="gsm8k"), ["a", "b"]))
    done = kvbench("report", str(run), "--by", "category", "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert "gsm8k by category" in done.out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "categories.csv",
        "categories.json",
        "categories.md",
    ]
    for words, message in (
        (["--by", "subject"], "--by 'subject': choose category."),
        (["--by", "category", "--memory"], "different reports"),
        (["--by", "category", "--baseline", "full"], "--by does not use --baseline"),
    ):
        done = kvbench("report", str(run), *words)
        assert (done.code, message in done.err) == (2, True), done.err
