"""Rows that may stand in one table though they differ: what mixes is said, with counts, in every format."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.report.categories import CategoryReport
from kvbench.report.load import load
from kvbench.report.memory import MemoryReport
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import make_tables

SCORES = [1.0, 0.5, 0.25, 1.0]
OLD = {"kvbench_version": "0.1.0", "torch_version": "2.12.0", "transformers_version": "5.2.0", "device": "cpu"}
OLD |= {"decoding": "torch"}


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
        ({"decoding": "torch compiled"}, "ways of decoding", {"torch": 4, "torch compiled": 4}),
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


def test_later_turns_with_images_share_a_table_with_text(make_run: Callable, rows: Callable) -> None:
    """ "reset (images)" follows from the question; --multi-turn reset and the chat template do not."""

    def run(name: str, *modes: str) -> Path:
        parts = rows("full", None, SCORES), rows("gkv", 48, SCORES)
        return make_run(name, *([row | {"multi_turn_cache": m} for row, m in zip(part, modes)] for part in parts))

    shown = run("shown", "keep", "reset (images)", "keep", "reset (images)")
    for group_by in ([], ["multi_turn_cache"]):
        report = ScoreReport.make(load([shown], group_by))
        line = "walk: rows of two ways to read later turns, keep (4 rows) and reset (images) (4 rows)."
        assert all(line in FORMATS[name](report).replace("\\", "") for name in ("text", "markdown"))
        assert [cell.samples for cell in make_tables(load([shown], group_by))[0].cells] == [4, 4]
    for name, mode in {"asked": "reset", "template": "reset (template)"}.items():
        mixed = run(name, "reset (images)", "keep", mode)
        with pytest.raises(UserError, match=r"later turns keep and .* has later turns reset.*; scores"):
            load([mixed])
        assert len(load([mixed], ["multi_turn_cache"]).groups) == 2


# --- two runs of the same rows


def test_rows_that_an_earlier_run_has_are_left_out_and_this_is_said(make_run: Callable, rows: Callable) -> None:
    today, yesterday = (make_run(n, rows("gkv", 48, SCORES)) for n in ("today", "yesterday"))
    more = [row | {"row_key": f"new{i}", "doc_id": f"n{i}"} for i, row in enumerate(rows("gkv", 48, SCORES))]
    loaded = load([today, yesterday, make_run("more", more)])
    assert loaded.repeated == [
        "4 rows of yesterday left out: today has the same rows, which are used instead (all scores are equal). "
        f"To compare the two runs: kvbench compare {yesterday} {today}"
    ]
    assert make_tables(loaded)[0].cells[0].samples == 8
    report = ScoreReport.make(loaded)
    assert all("4 rows of yesterday left out: today has" in FORMATS[name](report) for name in ("text", "markdown"))
    assert json.loads(FORMATS["json"](report))["repeated"] == loaded.repeated


def test_scores_that_differ_between_equal_rows_are_counted(make_run: Callable, rows: Callable) -> None:
    worse = rows("gkv", 48, [0.0, *SCORES[1:]])
    loaded = load([make_run("today", rows("gkv", 48, SCORES)), make_run("yesterday", worse)])
    (line,) = loaded.repeated
    assert line.startswith(
        "4 rows of yesterday left out: today has the same rows, which are used instead (1 of 4 scores differ)"
    )
    assert make_tables(loaded)[0].cells[0].score.mean == pytest.approx(sum(SCORES) / 4)


def test_rows_that_many_runs_share_are_named_by_pairs(make_run: Callable, rows: Callable) -> None:
    runs = [make_run(f"r{n}", rows("gkv", 48, SCORES)) for n in range(7)]
    lines = load(runs).repeated
    assert [line.split(":")[0] for line in lines[:4]] == [f"4 rows of r{n} left out" for n in (1, 2, 3, 4)]
    assert lines[4:] == ["8 rows of further runs left out, because other runs have the same row keys."]


def test_runs_of_one_name_are_told_apart_by_their_folders(make_run: Callable, rows: Callable, tmp_path: Path) -> None:
    first = make_run("r1", rows("gkv", 48, SCORES))
    second = tmp_path / "copies/r1"
    shutil.copytree(first, second)
    loaded = load([first, second])
    assert [run["run"] for run in loaded.runs] == [str(first), str(second)]
    assert loaded.repeated[0].startswith(f"4 rows of {second} left out: {first} has")


def test_the_command_for_repeated_rows_runs_as_it_stands(
    make_run: Callable, rows: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Outside ./results, with a blank in a path, and for a table."""
    table = tmp_path / "t 1" / "rows.parquet"
    table.parent.mkdir()
    shutil.copy(make_run("r", rows("gkv", 48, SCORES)) / "rows.parquet", table)
    shutil.move(tmp_path / "results", tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    (line,) = load([Path("kept/r"), Path("t 1/rows.parquet")]).repeated
    command = shlex.split(line.partition("two runs: ")[2])
    assert command == ["kvbench", "compare", "t 1/rows.parquet", "kept/r"]
    assert main(command[1:]) == 0
    assert "BASE t 1/rows.parquet: " in capsys.readouterr().out


def test_a_failed_row_that_another_run_has_is_left_out_and_this_is_said(make_run: Callable, rows: Callable) -> None:
    bad = [row | {"status": "oom", "score": None, "score_partial": None} for row in rows("gkv", 48, SCORES)[:1]]
    loaded = load([make_run("r1", bad), make_run("r2", rows("gkv", 48, SCORES))])
    assert [line[:26] for line in loaded.repeated] == ["1 row of r1 left out: r2 h"]


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
        "no table of walk: method 'mine' used plug-in mine 3f2a9c01 in r1, but plug-in mine 77aa01de in r2; scores are "
        "not comparable. --group-by all makes separate tables."
    )


def test_a_clash_of_one_task_leaves_the_tables_of_the_others(make_run: Callable, rows: Callable) -> None:
    runs = edited(make_run, rows)
    other = make_run("r3", rows("full", None, SCORES, task="chain"), rows("gkv", 48, SCORES, task="chain"))
    loaded = load([*runs, other])
    assert [group.task for group in loaded.groups] == ["chain"]
    (clash,) = loaded.clashes
    assert clash.startswith("no table of walk: method 'mine' used plug-in mine 3f2a9c01 in r1, but ")
    report = ScoreReport.make(loaded)
    assert all(clash in FORMATS[name](report).replace("\\", "") for name in ("text", "markdown"))
    assert json.loads(FORMATS["json"](report))["clashes"] == [clash]


def test_one_cause_is_one_line_for_all_its_tasks(make_run: Callable, rows: Callable) -> None:
    runs = [
        make_run(f"r{seed}", *(rows("gkv", 48, SCORES, task=task, seed=seed) for task in ("chain", "walk")))
        for seed in (1, 2)
    ]
    with pytest.raises(UserError) as error:
        load([*runs])
    assert str(error.value) == (
        "no table of chain, walk: r1 has seed 1 and r2 has seed 2; scores are not comparable. "
        "--group-by seed makes separate tables."
    )


def test_other_prompts_are_put_apart_by_run(make_run: Callable, rows: Callable) -> None:
    runs = [make_run("r1", rows("gkv", 48, SCORES)), make_run("r2", rows("tova", 48, SCORES, prompt_sha256="other"))]
    assert [(t.group, [c.method for c in t.cells]) for t in make_tables(load(runs, ["all"]))] == [
        ("run r1", ["gkv"]),
        ("run r2", ["tova"]),
    ]


def test_two_prompts_in_one_run_stay_a_clash(make_run: Callable, rows: Callable) -> None:
    both = [*rows("gkv", 48, SCORES), *rows("tova", 48, SCORES, prompt_sha256="other")]
    message = r"in r1 alone \(other data or template\); .* The run's table was joined or edited\."
    with pytest.raises(UserError, match=message):
        load([make_run("r1", both)], ["all"])


def test_a_report_of_all_runs_puts_them_apart(make_run: Callable, rows: Callable) -> None:
    tables = make_tables(load(edited(make_run, rows), ["all"]))
    assert [(t.group, [c.method for c in t.cells]) for t in tables] == [
        ("plug-in mine 3f2a9c01", ["full", "mine"]),
        ("plug-in mine 77aa01de", ["full", "mine"]),
    ]


def test_versions_and_judges_are_put_apart_too(make_run: Callable, rows: Callable) -> None:
    versions = rows("gkv", 48, SCORES), rows("gkv", 64, SCORES, method_version="2")
    judged = (
        rows("gkv", 48, SCORES, task="chain", judge="gpt-4o-2024-05-13, 2026-01-01, single"),
        rows("gkv", 64, SCORES, task="chain", judge="gpt-4o-2024-08-06, 2026-01-02, single"),
    )
    runs = [make_run(f"r{i}", *pair) for i, pair in enumerate(zip(versions, judged))]
    with pytest.raises(UserError, match="not comparable"):
        load(runs)
    groups = [(t.task, t.group) for t in make_tables(load(runs, ["all"]))]
    assert groups == [
        *(("chain", f"judge gpt-4o-2024-{date}, , single") for date in ("05-13", "08-06")),
        *(("walk", f"gkv version {version}") for version in (1, 2)),
    ]


# --- questions


def test_one_sample_of_two_answer_keys_counts_once(make_run: Callable, rows: Callable) -> None:
    """The reference answers were corrected between the runs: other row keys, equal prompts."""
    other = [row | {"row_key": f"b{i}"} for i, row in enumerate(rows("gkv", 48, [0.0] * 4))]
    runs = [make_run("r1", rows("gkv", 48, [1.0] * 4)), make_run("r2", other)]
    with pytest.raises(UserError) as caught:
        load(runs)
    assert "runs r1 and r2 each have a row of gkv for the same sample of question" in str(caught.value)
    groups = load(runs, ["all"]).groups
    assert [group.label for group in groups] == ["run r1", "run r2"]
    more = [row | {"row_key": f"c{i}", "sample": 1} for i, row in enumerate(rows("gkv", 48, [0.0] * 4))]
    assert make_tables(load([runs[0], make_run("r3", more)]))[0].cells[0].samples == 8


def test_one_sample_from_before_and_after_an_option_counts_once(make_run: Callable, rows: Callable) -> None:
    options = choose.make("rkv", {}).options()
    old = {name: value for name, value in options.items() if name != "alpha"}
    runs = [make_run(name, rows("rkv", 48, SCORES, options=of)) for name, of in (("r1", old), ("r2", options))]
    with pytest.raises(
        UserError, match=r"runs r1 and r2 each have a row of rkv .* \(one lacks an option that the other"
    ):
        load(runs)
    assert [table.cells[0].samples for table in make_tables(load(runs, ["all"]))] == [4, 4]
    other = rows("rkv", 48, SCORES, options=options | {"alpha": 0.5})
    assert len(make_tables(load([runs[0], make_run("r3", other)]))[0].cells) == 2


def test_a_row_of_a_sample_that_a_table_has_twice(make_run: Callable, rows: Callable) -> None:
    twice = [*rows("gkv", 48, SCORES), *[row | {"row_key": f"b{i}"} for i, row in enumerate(rows("gkv", 48, SCORES))]]
    with pytest.raises(UserError, match=r"run r1 has two rows of gkv for one sample.* was joined or edited"):
        load([make_run("r1", twice)])


def test_settings_that_vary_by_question_are_compared_by_question(make_run: Callable, rows: Callable) -> None:
    own = [row | {"temperature": t} for row, t in zip(rows("full", None, SCORES), (0.7, 0.0, 0.7, 0.1))]
    thinks = [row | {"thinking": number % 2 == 1} for number, row in enumerate(rows("gkv", 48, SCORES))]
    assert len(load([make_run("t1", thinks)]).groups) == 1
    runs = [make_run("r1", own), make_run("r2", rows("gkv", 48, SCORES, temperature=0.5))]
    with pytest.raises(UserError, match=r"r1 has temperature 0\.[0-9] and r2 has temperature 0\.5; scores"):
        load(runs)
    assert [group.label for group in load(runs, ["all"]).groups] == ["run r1", "run r2"]
    other = [row | {"row_key": f"b{i}"} for i, row in enumerate(rows("gkv", 48, SCORES, temperature=0.5))]
    plain = [make_run("p0", rows("gkv", 48, SCORES, temperature=0.0)), make_run("p1", other)]
    assert [group.label for group in load(plain, ["all"]).groups] == ["temperature 0.0", "temperature 0.5"]
