"""Averages over the tasks of a group: values by hand, what is missing, and what does not belong together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from kvbench.tasks.longbench import SETS

from kvbench.report.load import load
from kvbench.report.render import FORMATS, write
from kvbench.report.scores import ScoreReport
from kvbench.report.stats import smallest_drop
from kvbench.taskkit.names import expand, get_task

ENGLISH = [name for name, one in SETS.items() if one.language != "zh"]


def scores(number: int) -> list[float]:
    """Eight 0/1 scores of the task of this number, so that tasks differ."""
    return [float((question * 7 + number * 3) % 5 < 2) for question in range(8)]


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def se(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def answers(name: str) -> dict[str, int]:
    """The tasks of a group differ in how long an answer may be."""
    return {"max_new_tokens": get_task(f"longbench/{name}").gen("").max_new_tokens}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def longbench(rows: Callable) -> Callable:
    """longbench(names, method, budget) -> rows of these sets."""

    def made(names: list[str], method: str = "full", budget: int | None = None, shift: int = 0, **changes: object):
        parts = [
            rows(
                method, budget, scores(number + shift), task=f"longbench/{name}", floor=None, **answers(name) | changes
            )
            for number, name in enumerate(names)
        ]
        return [row for part in parts for row in part]

    return made


def test_means_and_errors_by_hand(make_run: Callable, longbench: Callable):
    names = list(SETS)
    report = ScoreReport.make(load([make_run("r1", longbench(names), longbench(names, "gkv", 48, shift=1))]))
    (table,) = report.averages
    full, gkv = table.rows
    assert (table.block().title, table.names) == (
        "longbench: averages, evicting every 32 tokens",
        ["avg16", "macro6_en", "macro6_zh", "avg21"],
    )
    by_name = {name: scores(number) for number, name in enumerate(names)}
    assert full.means["avg16"].value == pytest.approx(mean([mean(by_name[name]) for name in ENGLISH]))
    assert full.means["avg16"].se == pytest.approx(math.sqrt(sum(se(by_name[n]) ** 2 for n in ENGLISH)) / 16)
    assert full.means["avg21"].value == pytest.approx(mean([mean(values) for values in by_name.values()]))
    categories = [
        mean([mean(by_name[n]) for n in SETS if SETS[n].category == c and SETS[n].language in ("en", "code")])
        for c in dict.fromkeys(one.category for one in SETS.values())
    ]
    assert full.means["macro6_en"].value == pytest.approx(mean(categories))
    differences = [[a - b for a, b in zip(scores(i + 1), scores(i))] for i in range(21)]
    assert gkv.means["avg21"].diff == pytest.approx(mean([mean(d) for d in differences]))
    assert gkv.means["avg21"].diff_se == pytest.approx(math.sqrt(sum(se(d) ** 2 for d in differences)) / 21)
    assert math.isnan(full.means["avg21"].diff)


def test_every_format_has_them_below_the_last_member(make_run: Callable, longbench: Callable, tmp_path: Path):
    names = list(SETS)
    others = [row | {"task": "walk", "row_key": f"w{i}"} for i, row in enumerate(longbench(["lcc"]))]
    report = ScoreReport.make(load([make_run("r1", longbench(names), longbench(names, "gkv", 48), others)]))
    (table,) = report.averages
    shown = f"{table.rows[1].means['avg16'].value:.3f}"
    for name in ("text", "markdown"):
        text = FORMATS[name](report).partition("Small gains may be noise.")[2]  # after the first page
        block = text[text.index("longbench: averages") :]
        assert text.index("longbench/repobench-p") < text.index("longbench: averages") < text.index("walk")
        assert shown in block
        assert "minus full" in block.split("walk")[0]
    document = json.loads(FORMATS["json"](report))
    (full, gkv) = document["averages"]
    assert (full["task"], full["method"], full["budget"], gkv["method"], gkv["budget"]) == (
        "longbench", "full", None, "gkv", 48,
    )  # fmt: skip
    assert gkv["averages"]["avg16"]["mean"] == table.rows[1].means["avg16"].value
    assert gkv["averages"]["avg16"]["missing"] == []
    files = {path.name: path.read_text() for path in write(report, tmp_path / "out")}
    assert "longbench: averages" in files["report.md"]
    assert json.loads(files["report.json"])["averages"] == document["averages"]


def test_what_is_missing_is_said_and_nothing_is_averaged(make_run: Callable, longbench: Callable):
    less = [name for name in ENGLISH if name not in ("trec", "lcc")]
    report = ScoreReport.make(load([make_run("r1", longbench(ENGLISH), longbench(less, "gkv", 48))]))
    (table,) = report.averages
    full, gkv = table.rows
    assert table.names == ["avg16", "macro6_en"]
    assert full.means["avg16"].missing == ()
    assert gkv.means["avg16"].missing == ("trec", "lcc")
    assert math.isnan(gkv.means["avg16"].value)
    assert "avg16 of gkv at 48: trec, lcc missing." in table.notes
    assert not any(note.startswith(("avg16 of full", "avg16:")) for note in table.notes)
    zh = [name for name, one in SETS.items() if one.language == "zh"]
    assert f"macro6_zh of full: {', '.join(zh)} missing." in table.notes
    data = json.loads(FORMATS["json"](report))["averages"][1]["averages"]["avg16"]
    figures = ("mean", "se", "low", "high", "diff", "diff_se", "diff_low", "diff_high")
    assert data == dict.fromkeys(figures) | {"missing": ["trec", "lcc"]}


def test_a_mean_over_tasks_without_spread_has_an_interval(make_run: Callable, longbench: Callable):
    """Sixteen tasks with eight questions each, all wrong: each score may be up to 3/8, their mean up to 3/8 / 4."""
    made = [
        [row | {"score": 0.0, "score_partial": 0.0} for row in longbench(ENGLISH, method, budget)]
        for method, budget in (("full", None), ("gkv", 48))
    ]
    report = ScoreReport.make(load([make_run("r1", *made)]))
    (table,) = report.averages
    mean = table.rows[1].means["avg16"]
    bound = -math.log(0.05) / 8
    assert (mean.low, mean.high) == (0.0, pytest.approx(bound / 4))
    assert (mean.diff_low, mean.diff_high) == (pytest.approx(-bound / 4), pytest.approx(bound / 4))
    shown = FORMATS["markdown"](report)
    assert f"0.000 (0, {bound / 4:.3f}) | +0.000 (-0.09, +0.09)" in shown
    assert "±0.000" not in shown


def test_the_drop_that_an_average_could_show_stands_below_it(make_run: Callable, longbench: Callable):
    run = make_run("r1", longbench(ENGLISH), *(longbench(ENGLISH, "gkv", b, shift=1) for b in (48, 64)))
    (table,) = ScoreReport.make(load([run])).averages
    errors = [row.means["avg16"].diff_se for row in table.rows if row.baseline]
    drop = max(smallest_drop(error, 7, alpha=0.05 / 2) for error in errors)
    assert table.notes[-1] == (
        f"A true drop of avg16 by {drop:.3f} is found with 80% power in 2 of 2 comparisons (two-sided t at 5% after "
        "Holm over 2)."
    )


def test_without_any_average_only_what_is_missing_is_said(make_run: Callable, longbench: Callable):
    report = ScoreReport.make(load([make_run("r1", longbench(["lcc", "trec"]))]))
    (table,) = report.averages
    assert table.names == []
    assert len(table.notes) == 4
    for name in ("text", "markdown"):
        assert "avg21: narrativeqa" in FORMATS[name](report).replace("\\", "")


def test_one_task_alone_has_no_averages(make_run: Callable, longbench: Callable):
    assert ScoreReport.make(load([make_run("r1", longbench(["lcc"]))])).averages == []


def test_a_task_whose_samples_failed_is_missing(make_run: Callable, longbench: Callable):
    bad = [row | ({"status": "error", "score": None} if row["task"] == "longbench/lcc" else {})
           for row in longbench(ENGLISH)]  # fmt: skip
    (table,) = ScoreReport.make(load([make_run("r1", bad)])).averages
    assert table.rows[0].means["avg16"].missing == ("lcc",)


def test_lengths_and_settings_are_kept_apart(make_run: Callable, rows: Callable, longbench: Callable):
    tasks = [f"ruler_offline/{name}@{length}" for length in (4096, 8192) for name in ("vt", "fwe", "cwe")]
    ruler = [row for task in tasks for row in rows("full", None, scores(0), task=task, floor=None)]
    tables = ScoreReport.make(load([make_run("r1", ruler)])).averages
    assert [table.task for table in tables] == ["ruler_offline@4096", "ruler_offline@8192"]
    half = len(ENGLISH) // 2
    runs = [
        make_run("a", longbench(ENGLISH[:half])),
        make_run("b", longbench(ENGLISH[half:], model="another")),
    ]
    of_two_models = ScoreReport.make(load(runs)).averages
    assert len(of_two_models) == 2
    assert all(row.means["avg16"].missing for table in of_two_models for row in table.rows)


LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# GPT-4 in table 3 of RULER's paper: its score at each length, their mean, and the means weighted by length.
GPT_4, MEAN, INC, DEC = (0.966, 0.963, 0.952, 0.932, 0.870, 0.812), 0.916, 0.890, 0.941


@pytest.fixture
def ruler(rows: Callable) -> Callable:
    """ruler(values, method, budget) -> rows of the six subtasks, at each length with two questions around its value."""

    def made(values: dict[int, float], method: str = "full", budget: int | None = None, **changes: object):
        tasks = [get_task(f"{task.partition('@')[0]}@{n}") for task in expand("ruler_offline") for n in values]
        parts = [
            rows(
                method, budget, [values[task.length] + d for d in (0.0, -0.1, 0.1)], task=task.name,
                **{"max_new_tokens": task.gen("").max_new_tokens} | changes,
            )
            for task in tasks
        ]  # fmt: skip
        return [row | {"score": row["score_partial"], "floor": None} for part in parts for row in part]

    return made


def test_means_over_lengths_are_those_of_the_paper(make_run: Callable, ruler: Callable):
    values = dict(zip(LENGTHS, GPT_4))
    worse = {length: value - 0.05 * number for number, (length, value) in enumerate(values.items())}
    report = ScoreReport.make(load([make_run("r1", ruler(values), ruler(worse, "gkv", 48))]))
    table = report.averages[-1]
    assert (table.block().title, table.names) == (
        "ruler_offline@*: averages, evicting every 32 tokens",
        ["mean of 6, all lengths", "inc", "dec"],
    )
    assert table.last is report.tables[-1]
    full, gkv = (row.means for row in table.rows)
    assert [round(full[name].value, 3) for name in table.names] == [MEAN, INC, DEC]
    error = 0.1 / math.sqrt(3)  # of one subtask at one length
    assert full["inc"].se == pytest.approx(error / math.sqrt(6) * math.sqrt(sum(n**2 for n in range(1, 7))) / 21)
    assert gkv["inc"].diff == pytest.approx(-0.05 * sum(n * (n - 1) for n in range(1, 7)) / 21)
    assert gkv["dec"].diff == pytest.approx(-0.05 * sum((7 - n) * (n - 1) for n in range(1, 7)) / 21)
    assert gkv["inc"].diff_se == pytest.approx(0.0, abs=1e-9)
    for name in ("text", "markdown"):
        assert "0.890" in FORMATS[name](report).replace("\\", "").split("ruler_offline@*: averages")[1]
    last = json.loads(FORMATS["json"](report))["averages"][-1]
    assert (last["task"], last["method"], last["averages"]["dec"]["missing"]) == ("ruler_offline@*", "gkv", [])


def test_a_length_that_is_missing_is_said(make_run: Callable, ruler: Callable):
    values = dict(zip(LENGTHS, GPT_4))
    report = ScoreReport.make(load([make_run("r1", ruler(values), ruler(dict(zip(LENGTHS[:2], GPT_4)), "gkv", 48))]))
    table = report.averages[-1]
    gkv = table.rows[1].means["inc"]
    assert math.isnan(gkv.value)
    assert gkv.missing == ("@16384", "@32768", "@65536", "@131072")
    assert "mean of 6, all lengths of gkv at 48: @16384, @32768, @65536, @131072 missing." in table.notes
    assert not table.rows[0].means["inc"].missing


def test_one_length_alone_has_no_means_over_lengths(make_run: Callable, ruler: Callable):
    tables = ScoreReport.make(load([make_run("r1", ruler({4096: 0.5}))])).averages
    assert [table.task for table in tables] == ["ruler_offline@4096"]


def test_lengths_of_other_settings_are_not_averaged(make_run: Callable, ruler: Callable):
    parts = ruler({4096: 0.5}), ruler({8192: 0.5}, temperature=0.6)
    tables = ScoreReport.make(load([make_run("r1", *parts)])).averages
    assert [table.task for table in tables] == ["ruler_offline@4096", "ruler_offline@8192"]


def test_the_full_cache_joins_runs_at_any_interval(make_run: Callable, longbench: Callable):
    half = len(ENGLISH) // 2
    runs = [make_run("a", longbench(ENGLISH[:half])), make_run("b", longbench(ENGLISH, "gkv", 48, interval=64))]
    (table,) = ScoreReport.make(load(runs)).averages
    assert table.interval == 64
    assert [row.means["avg16"].missing == () for row in table.rows] == [False, True]


def test_unfinished_runs_are_marked(make_run: Callable, longbench: Callable):
    report = ScoreReport.make(load([make_run("r1", longbench(ENGLISH), planned=500)]))
    assert report.averages[0].rows[0].progress == "128 of 500 rows"
    text = FORMATS["text"](report)
    assert "(128 of 500 rows)" in text[text.index("longbench: averages") :]
