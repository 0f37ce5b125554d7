"""Tables: the right numbers, fair comparisons, and no table of rows that do not compare."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.errors import KVBenchError, UserError
from kvbench.eviction import choose
from kvbench.report import stats
from kvbench.report.cells import ScoreCell, method_label
from kvbench.report.load import find_runs, load
from kvbench.report.render import text
from kvbench.report.scores import ScoreReport, block
from kvbench.report.tables import TaskTable, make_tables

DRAW = random.Random(0)
GOOD = [DRAW.choice([1.0, 1.0, 0.8]) for _ in range(32)]
BAD = [max(0.0, s - DRAW.random()) for s in GOOD]


def one(path: Path, baseline: str | None = None) -> TaskTable:
    (table,) = make_tables(load([path]), baseline)
    return table


def cell(table: TaskTable, method: str, budget: float | None = None) -> ScoreCell:
    (found,) = (c for c in table.cells if c.method == method and c.budget == budget)
    return found


def test_means_errors_ratios_and_costs(make_run: Callable, rows: Callable) -> None:
    table = one(make_run("r1", rows("full", None, GOOD), rows("gkv", 48, BAD)))
    full, gkv = cell(table, "full"), cell(table, "gkv", 48)
    assert [c.method for c in table.cells] == ["full", "gkv"]
    assert table.headline == "score_partial"
    assert gkv.score.mean == pytest.approx(statistics.mean(BAD))
    assert gkv.score.se == pytest.approx(statistics.stdev(BAD) / math.sqrt(32))
    assert gkv.others["score"] == pytest.approx(sum(s == 1 for s in BAD) / 32)
    assert gkv.of_full == {
        "score": pytest.approx(statistics.mean(BAD) / statistics.mean(GOOD)),
        "bytes": pytest.approx(0.25),
        "speed": pytest.approx((100 / 1.25) / (100 / 2.5)),
        "speed_sd": pytest.approx(math.nan, nan_ok=True),
    }
    assert (gkv.entries_after_evict, gkv.entries_peak, gkv.floor) == (48, 80, 0.1)
    assert gkv.evict_share == pytest.approx(0.2)
    assert math.isnan(full.entries_after_evict)
    assert math.isnan(full.floor)
    assert full.against is None


def timed(rows: list[dict[str, Any]], seconds: list[float], load: float | None) -> list[dict[str, Any]]:
    return [row | {"decode_seconds": s, "evict_seconds": 0.0, "machine_load": load} for row, s in zip(rows, seconds)]


def test_samples_decoded_side_by_side_are_one_measurement_of_speed(make_run: Callable, rows: Callable) -> None:
    batches = timed(rows("gkv", 48, [1.0] * 6), [1.0] * 3 + [1.5] * 3, None)
    together = timed(rows("gkv", 64, [1.0] * 6), [1.0] * 6, None)
    table = one(make_run("r1", batches, together))
    assert cell(table, "gkv", 48).tokens_per_second_sd == pytest.approx(statistics.stdev([99 / 1.0, 99 / 1.5]))
    assert math.isnan(cell(table, "gkv", 64).tokens_per_second_sd)


def test_speeds_have_their_spread_over_batches_and_the_load(make_run: Callable, rows: Callable) -> None:
    slow, fast = [9.9, 8.9, 10.9], [4.4, 4.95, 5.5]
    run = make_run("r1", timed(rows("full", None, [1.0] * 3), slow, 1.0), timed(rows("gkv", 48, [1.0] * 3), fast, 3.5))
    table = one(run)
    full, gkv = cell(table, "full"), cell(table, "gkv", 48)
    spreads = [statistics.stdev([99 / s for s in seconds]) for seconds in (slow, fast)]
    assert [full.tokens_per_second_sd, gkv.tokens_per_second_sd] == pytest.approx(spreads)
    assert (full.machine_load, gkv.machine_load) == (1.0, 3.5)
    rates = [3 * 99 / sum(seconds) for seconds in (slow, fast)]
    noise = math.hypot(spreads[0] / rates[0], spreads[1] / rates[1])
    assert gkv.of_full["speed_sd"] == pytest.approx(gkv.of_full["speed"] * noise)
    shown = text(ScoreReport.make(load([run])))
    assert f"{rates[1]:,.0f} ±{spreads[1]:,.0f}" in shown
    assert "1.00 to 3.50 per core. Speeds of cells that ran under different load cannot" in " ".join(shown.split())
    even = make_run("r2", timed(rows("full", None, [1.0] * 3), slow, 1.0), timed(rows("gkv", 48, [1.0] * 3), fast, 1.1))
    assert "Load of the machine while these cells ran: 1.00 to 1.10 per core." in one(even).notes


def test_an_exact_score_above_the_partial_score_is_explained(make_run: Callable, rows: Callable) -> None:
    """The answer is right by luck, after a wrong first step."""
    lucky = [row | {"score": 1.0} for row in rows("gkv", 32, [0.0])] + rows("gkv", 32, [0.0] * 23)[1:]
    table = one(make_run("r1", rows("full", None, GOOD[:23]), lucky))
    (line,) = [note for note in table.notes if "above partial" in note]
    assert line.startswith("Score above partial (gkv at 32): score rates the final answer and partial the steps")
    assert not any("above partial" in note for note in one(make_run("r2", rows("gkv", 32, GOOD))).notes)


def test_an_older_run_says_that_its_load_is_not_recorded(make_run: Callable, rows: Callable) -> None:
    (line,) = [note for note in one(make_run("r1", rows("full", None, GOOD))).notes if "Load" in note]
    assert line.startswith("Load of the machine while these cells ran: not recorded.")


def test_comparison_is_paired_and_adjusted_over_the_table(make_run: Callable, rows: Callable) -> None:
    near = [max(0.0, s - 0.01 * (i % 2)) for i, s in enumerate(GOOD)]
    table = one(
        make_run("r1", rows("full", None, GOOD), rows("gkv", 48, BAD), rows("rkv", 48, near), rows("tova", 48, GOOD))
    )
    singles = [stats.paired([[s] for s in x], [[s] for s in GOOD]) for x in (BAD, near, GOOD)]
    against = [cell(table, name, 48).against for name in ("gkv", "rkv", "tova")]
    assert [a.judged.p for a in against if a] == pytest.approx(stats.holm([s.p for s in singles]))
    assert [a.paired.p_sign_flip for a in against if a] == [s.p_sign_flip for s in singles]
    assert [a.paired.diff for a in against if a] == pytest.approx([s.diff for s in singles])
    assert [a.judged.verdict for a in against if a] == ["worse", "worse", "tied"]
    assert any("is found with 80% power in every comparison" in note for note in table.notes)


def test_another_baseline_is_compared_at_equal_budget(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("rkv", 48, BAD), rows("rkv", 64, GOOD), rows("gkv", 48, GOOD), rows("gkv", 64, GOOD))
    table = one(run, "rkv")
    better, tied = cell(table, "gkv", 48).against, cell(table, "gkv", 64).against
    assert better is not None
    assert tied is not None
    assert (better.judged.verdict, tied.judged.verdict) == ("better", "tied")
    assert cell(table, "rkv", 48).against is None
    assert one(run).cells[0].against is None  # no full cache here: nothing is compared
    with pytest.raises(UserError, match=r"--baseline 'h2o' was not run\..* Methods: gkv, rkv\."):
        one(run, "h2o")


def test_a_baseline_with_variants(make_run: Callable, rows: Callable) -> None:
    variants = [rows("gkv", 48, BAD, options={"window": n}) for n in (4, 8)]
    table = one(make_run("r1", *variants, rows("gkv", 48, GOOD), rows("rkv", 48, GOOD)), "gkv")
    assert {c.against.baseline for c in table.cells if c.against} == {"gkv"}
    assert cell(table, "gkv", 48).against is None
    several = make_run("r2", *variants, rows("rkv", 48, GOOD))
    with pytest.raises(UserError, match=r"'gkv': .* options: gkv\(window=4\) and gkv\(window=8\)\. Give one of them\."):
        one(several, "gkv")
    against = cell(one(several, "gkv(window=8)"), "rkv", 48).against
    assert against is not None
    assert against.baseline == "gkv(window=8)"
    alone = cell(one(make_run("r3", variants[0], rows("rkv", 48, GOOD)), "gkv"), "rkv", 48).against
    assert alone is not None
    assert alone.baseline == "gkv(window=4)"


def test_a_baseline_s_options_may_come_in_any_order(make_run: Callable, rows: Callable) -> None:
    options = choose.make("snapkv-decode", {"window": 8, "variant": "gkv"}).options()
    run = make_run("r", rows("snapkv-decode", 48, GOOD, options=options), rows("gkv", 48, BAD))
    against = cell(one(run, "SnapKV-decode( window=8,variant=gkv)"), "gkv", 48).against
    assert against is not None
    assert against.baseline == "snapkv-decode(variant=gkv, window=8)"
    for given in ("snapkv-decode(window=4)", "snapkv-decode(no=4)", "gkv(window=8"):
        with pytest.raises(
            UserError, match=r"was not run with these options. In the rows: (snapkv-decode\(v.*8\)|gkv)\."
        ):
            one(run, given)


def test_the_record_states_the_main_score_of_a_task_that_is_not_installed(make_run: Callable, rows: Callable) -> None:
    """Samples vote for an answer unless the record says that a judge rates them."""
    cells = [r | {"row_key": f"{n}{i}", "sample": n} for n in (0, 1) for i, r in enumerate(rows("gkv", 48, BAD))]
    cells = [row | {"task": "own", "extracted": "7"} for row in cells]
    stated = {"version": "1", "data": {}, "headline": "score_partial", "needs": ["judge"]}
    loaded = load([make_run("new", cells, tasks={"own": stated})])
    [table] = make_tables(loaded)
    assert (table.headline, loaded.notices) == ("score_partial", [])
    assert math.isnan(table.cells[0].maj)
    for name, record in (("old", {"version": "1", "data": {}}), ("odd", stated | {"headline": "row_key"})):
        loaded = load([make_run(name, cells, tasks={"own": record})])
        [table] = make_tables(loaded)
        assert table.headline == "score"
        assert table.cells[0].maj < 1
        assert loaded.notices[0].startswith(
            "the main score of own is unknown: not installed here, and the runs do not state it."
        )


def test_only_shared_questions_are_compared(make_run: Callable, rows: Callable) -> None:
    table = one(make_run("r1", rows("full", None, GOOD), rows("gkv", 48, BAD[:20])))
    against = cell(table, "gkv", 48).against
    assert against is not None
    assert against.paired.questions == 20
    assert any("different questions" in note for note in table.notes)


def test_shares_of_the_full_cache_are_over_shared_questions(make_run: Callable, rows: Callable) -> None:
    """The full cache alone was asked two more questions: easy ones with short answers, slowly made."""
    easy = [row | {"doc_id": f"e{i}", "row_key": f"e{i}"} for i, row in enumerate(rows("full", None, [1.0, 1.0]))]
    easy = [row | {"kv_bytes_peak": 1_000, "decode_seconds": 100.0} for row in easy]
    full = make_run("a", rows("full", None, [0.5, 0.5]), easy)
    gkv = cell(*make_tables(load([full, make_run("b", rows("gkv", 48, [0.5, 0.25]))])), "gkv", 48)
    shares = {"score": pytest.approx(0.75), "bytes": pytest.approx(0.25), "speed": pytest.approx(2.0)}
    shares["speed_sd"] = pytest.approx(math.nan, nan_ok=True)  # equal seconds: one batch
    assert gkv.of_full == shares


def test_without_a_shared_question_nothing_is_a_share(make_run: Callable, rows: Callable) -> None:
    other = [row | {"doc_id": f"o{i}", "row_key": f"o{i}"} for i, row in enumerate(rows("gkv", 48, BAD))]
    run = make_run("r1", rows("full", None, GOOD), other)
    gkv = cell(one(run), "gkv", 48)
    assert gkv.of_full
    assert all(math.isnan(share) for share in gkv.of_full.values())
    assert gkv.against is None
    shown = text(ScoreReport.make(load([run])))
    assert "shares of the full cache are over shared questions only" in " ".join(shown.split())


def test_what_an_unscored_answer_cost_is_a_share_too(make_run: Callable, rows: Callable) -> None:
    waiting = {"status": "unscored", "stop_reason": "length"}
    parts = [
        [row | waiting | {"score": None, "score_partial": None} for row in rows(m, b, GOOD)]
        for m, b in (("full", None), ("gkv", 48))
    ]
    gkv = cell(one(make_run("r1", *parts)), "gkv", 48)
    assert gkv.of_full
    assert (gkv.of_full["bytes"], gkv.of_full["speed"]) == (pytest.approx(0.25), pytest.approx(2.0))
    assert math.isnan(gkv.of_full["score"])
    assert gkv.truncated == 1


def test_failed_rows_have_no_score_and_are_counted(make_run: Callable, rows: Callable) -> None:
    bad = [row | {"status": "oom", "score": None, "score_partial": None} for row in rows("gkv", 48, BAD)[:2]]
    table = one(make_run("r1", rows("full", None, GOOD), [*rows("gkv", 48, BAD)[2:], *bad]))
    gkv = cell(table, "gkv", 48)
    assert (gkv.failed, gkv.samples, gkv.score.questions) == (2, 30, 30)
    assert gkv.score.mean == pytest.approx(statistics.mean(BAD[2:]))


def test_samples_of_a_question_are_not_independent(make_run: Callable, rows: Callable) -> None:
    more = [row | {"sample": k, "row_key": f"{row['row_key']}{k}"} for row in rows("gkv", 48, BAD) for k in range(8)]
    gkv = cell(one(make_run("r1", more)), "gkv", 48)
    assert (gkv.score.questions, gkv.score.samples) == (32, 256)
    assert gkv.score.se == pytest.approx(statistics.stdev(BAD) / math.sqrt(32))


def test_every_score_is_a_mean_over_questions(make_run: Callable, rows: Callable) -> None:
    """The first question has five samples, the others one: it counts as much as they do, in each column and error."""
    single = rows("gkv", 48, [1.0, 0.25, 0.5, 0.0])
    more = [single[0] | {"sample": k, "row_key": f"more{k}"} for k in range(1, 5)]
    table = one(make_run("r1", rows("full", None, [1.0, 1.0, 0.5, 0.5]), single + more))
    gkv = cell(table, "gkv", 48)
    assert (gkv.score.questions, gkv.samples) == (4, 8)
    assert gkv.score.mean == gkv.others["score_partial"] == pytest.approx(1.75 / 4)
    assert gkv.others["score"] == pytest.approx(1 / 4)
    assert gkv.score.se == pytest.approx(statistics.stdev([1.0, 0.25, 0.5, 0.0]) / 2)
    assert math.isnan(gkv.others["score_strict"])
    data = block(table).data()[table.cells.index(gkv)]
    assert (data["mean"], data["score"]) == (data["score_partial"], 0.25)
    assert gkv.of_full
    assert gkv.of_full["score"] == pytest.approx(1.75 / 3)


def test_questions_of_one_source_share_their_error(make_run: Callable, rows: Callable) -> None:
    """Two questions a source with equal scores: half as many independent observations."""
    twins = [s for s in BAD[:16] for _ in range(2)]
    clustered = [row | {"cluster_id": f"c{i // 2}"} for i, row in enumerate(rows("gkv", 48, twins))]
    gkv = cell(one(make_run("r1", clustered)), "gkv", 48)
    assert gkv.score.se == pytest.approx(statistics.stdev(BAD[:16]) / math.sqrt(16))


def test_a_method_with_other_options_is_another_line(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("gkv", 48, GOOD, options={"window": 16}), rows("gkv", 48, BAD, options={"window": 8}))
    assert {c.method for c in one(run).cells} == {"gkv", "gkv(window=8)"}
    assert method_label("nobody-knows-it", '{"x": 1}') == "nobody-knows-it(x=1)"


def test_a_run_of_failures_only_has_a_table_without_scores(make_run: Callable, rows: Callable) -> None:
    bad = [row | {"status": "oom", "score": None, "score_partial": None} for row in rows("gkv", 48, BAD)]
    gkv = cell(one(make_run("r1", rows("full", None, GOOD), bad)), "gkv", 48)
    assert (gkv.failed, gkv.samples) == (32, 0)
    assert math.isnan(gkv.score.mean)
    assert gkv.against is None


# --- what may stand in one table


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "other"}, "r1 has model tiny and r2 has model other"),
        ({"seed": 7}, "seed 0 and r2 has seed 7"),
        ({"temperature": 0.6}, "temperature"),
        ({"attention": "flash"}, "r1 has attention sdpa and r2 has attention flash"),
        ({"stop": '["x"]'}, 'r1 has stop strings [] and r2 has stop strings ["x"]'),
        ({"prompt_style": "plain"}, "prompt style default and r2 has prompt style plain"),
        ({"task_version": "2"}, "task version 1 and r2 has task version 2"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_runs_that_do_not_compare_are_refused(
    make_run: Callable, rows: Callable, change: dict[str, Any], word: str
) -> None:
    runs = [make_run("r1", rows("gkv", 48, GOOD)), make_run("r2", rows("tova", 48, BAD, **change))]
    (column,) = change
    with pytest.raises(UserError) as error:
        load(runs)
    assert word in str(error.value)
    assert str(error.value).endswith(f"scores are not comparable. --group-by {column} makes separate tables.")
    tables = make_tables(load(runs, [column]))
    assert sorted(c.method for t in tables for c in t.cells) == ["gkv", "tova"]
    assert len(tables) == 2
    assert len(make_tables(load(runs, ["all"]))) == 2


def test_the_full_cache_has_no_interval_and_joins_every_group(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("full", None, GOOD), rows("gkv", 48, BAD), rows("tova", 48, BAD, interval=64))
    tables = make_tables(load([run], ["interval"]))
    assert [sorted(c.method for c in t.cells) for t in tables] == [["full", "gkv"], ["full", "tova"]]


def test_only_the_task_that_differs_is_taken_apart(make_run: Callable, rows: Callable) -> None:
    same = rows("gkv", 48, GOOD, task="chain")
    runs = [make_run("r1", rows("gkv", 48, GOOD), same), make_run("r2", rows("gkv", 48, GOOD, seed=1))]
    assert [(t.task, t.group) for t in make_tables(load(runs, ["all"]))] == [
        ("chain", ""),
        ("walk", "seed 0"),
        ("walk", "seed 1"),
    ]


def test_versions_of_one_method_do_not_mix_but_other_methods_may(make_run: Callable, rows: Callable) -> None:
    old, new = rows("gkv", 48, GOOD), rows("gkv", 64, GOOD, method_version="2")
    with pytest.raises(UserError, match=r"gkv version 1 and r2 has gkv version 2"):
        load([make_run("r1", old), make_run("r2", new)])
    load([make_run("r3", old), make_run("r4", rows("tova", 64, GOOD, method_version="2"))])


def test_tables_and_drafts_do_not_mix(make_run: Callable, rows: Callable) -> None:
    mine = make_run("a", rows("headkv", 48, [1.0] * 3, artefacts={"headkv": "aa"}))
    theirs = rows("headkv", 48, [0.0] * 3, artefacts={"headkv": "bb"})
    other = make_run("b", [{**row, "row_key": f"b{i}"} for i, row in enumerate(theirs)])
    with pytest.raises(UserError, match="method 'headkv' used headkv aa in a, but headkv bb in b"):
        load([mine, other])


def test_rows_from_before_an_option_are_the_same_cell(make_run: Callable, rows: Callable) -> None:
    options = choose.make("rkv", {}).options()
    old = {name: value for name, value in options.items() if name not in ("global_score", "alpha")}
    both = rows("rkv", 48, [1.0, 1.0], options=options) + [
        {**row, "doc_id": f"old{row['doc_id']}", "row_key": f"old{i}"}
        for i, row in enumerate(rows("rkv", 48, [0.0, 0.0], options=old))
    ]
    [found] = one(make_run("a", both)).cells
    assert (found.method, found.score.questions) == ("rkv", 4)


def test_equal_questions_must_have_equal_prompts(make_run: Callable, rows: Callable) -> None:
    runs = [make_run("r1", rows("gkv", 48, GOOD)), make_run("r2", rows("tova", 48, GOOD, prompt_sha256="other"))]
    with pytest.raises(UserError, match="question 'q0' had two different prompts in r1 and r2"):
        load(runs)


def test_a_row_in_two_runs_counts_once(make_run: Callable, rows: Callable) -> None:
    runs = [make_run("r1", rows("gkv", 48, GOOD)), make_run("r2", rows("gkv", 48, GOOD))]
    (table,) = make_tables(load(runs))
    assert table.cells[0].samples == 32


def test_an_ok_row_beats_a_failed_one_of_another_run(make_run: Callable, rows: Callable) -> None:
    bad = [row | {"status": "error", "score": None, "score_partial": None} for row in rows("gkv", 48, GOOD)]
    for pair in (("r1", bad), ("r2", rows("gkv", 48, GOOD))), (("r3", rows("gkv", 48, GOOD)), ("r4", bad)):
        (table,) = make_tables(load([make_run(name, part) for name, part in pair]))
        assert (table.cells[0].samples, table.cells[0].failed) == (32, 0)


def test_an_unfinished_run_says_so_at_its_scores(make_run: Callable, rows: Callable) -> None:
    loaded = load([make_run("r1", rows("gkv", 48, GOOD), planned=960, seal=False)])
    assert loaded.unfinished == {"r1": "32 of 960 rows"}
    assert make_tables(loaded)[0].cells[0].progress == "32 of 960 rows"


def test_a_record_that_plans_too_few_rows_does_not_hide_missing_ones(make_run: Callable, rows: Callable) -> None:
    """Every cell of a task has as many rows; here one has none, and another half."""
    cells = ["walk full", "walk gkv @48", "walk gkv @25%", "walk tova @48", "walk(2) full"]
    plans = {"plans": [{"cell": cell} for cell in cells]}
    plans["tasks"] = {task: {"version": "1", "data": {}, "prompts": ""} for task in ("walk", "walk(2)")}
    shares = [r | {"budget": 10 + n, "budget_share": 0.25} for n, r in enumerate(rows("gkv", None, GOOD))]
    parts = [rows("full", None, GOOD), rows("gkv", 48, GOOD[:16]), shares, rows("full", None, GOOD[:4], task="walk(2)")]
    for number, row in enumerate(row for part in parts for row in part):
        row["row_key"] = f"k{number}"
    loaded = load([make_run("short", *parts, seal=False, **plans)])
    assert loaded.unfinished == {"short": "84 of 132 rows"}
    whole = [*parts[:1], rows("gkv", 48, GOOD), parts[2], rows("tova", 48, GOOD), parts[3]]
    assert load([make_run("whole", *whole, **plans)]).unfinished == {}


def test_finding_runs(make_run: Callable, rows: Callable, tmp_path: Path) -> None:
    r1, r2 = make_run("r1", rows("gkv", 48, GOOD)), make_run("r2", rows("tova", 48, GOOD))
    results = tmp_path / "results"
    assert find_runs([], results) == [r1, r2]
    assert find_runs(["r2"], results) == [r2]
    assert find_runs([str(results), str(r1)], results) == [r1, r2]
    assert find_runs([str(r1 / "rows.parquet")], results) == [r1 / "rows.parquet"]
    with pytest.raises(UserError, match=r"no run 'r3'\. Runs in .*: r1, r2\."):
        find_runs(["r3"], results)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"has no kvbench run \(no run.json\)"):
        find_runs([str(empty)], results)


def test_a_table_file_alone_makes_a_report(make_run: Callable, rows: Callable) -> None:
    run = make_run("r1", rows("gkv", 48, GOOD))
    assert one(run / "rows.parquet").cells == one(run).cells


def test_pass_at_k_and_majority_over_samples(make_run: Callable, rows: Callable) -> None:
    """Three questions of four samples: 1, 2 and 0 right; the majority is right on the second only."""
    answers = {"q1": ("7", "8", "8", "9"), "q2": ("5", "5", "6", "4"), "q3": (None, "1", "2", "3")}
    right = {"q1": (1, 0, 0, 0), "q2": (1, 1, 0, 0), "q3": (0, 0, 0, 0)}
    (plain,) = rows("gkv", 48, [0.0])
    made = [
        plain | {"doc_id": doc, "sample": k, "row_key": f"{doc}{k}", "score": float(right[doc][k]), "extracted": answer}
        for doc in answers
        for k, answer in enumerate(answers[doc])
    ]
    gkv = cell(one(make_run("r1", made)), "gkv", 48)
    assert list(gkv.pass_at) == [1, 2, 4]
    assert gkv.pass_at[1] == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert gkv.pass_at[2] == pytest.approx((0.5 + (1 - 1 / 6) + 0) / 3)
    assert gkv.pass_at[4] == pytest.approx(2 / 3)
    assert gkv.maj == pytest.approx(1 / 3)
    assert cell(one(make_run("r2", [made[0], *made[4:]])), "gkv", 48).pass_at == {}
    programs = [row | {"task": "livecodebench"} for row in made]
    assert math.isnan(cell(one(make_run("r3", programs)), "gkv", 48).maj)


def test_a_share_is_one_cell_whatever_it_means_for_each_prompt(make_run: Callable, rows: Callable) -> None:
    shares = rows("gkv", 40, BAD, budget_share=0.25)
    for number, row in enumerate(shares):
        row["budget"] = 40 + number % 3
        row["row_key"] = f"share{number}"
    run = make_run("r1", rows("full", None, GOOD), rows("gkv", 48, GOOD), shares, rows("rkv", 48, GOOD))
    table = one(run)
    assert [(c.method, c.budget) for c in table.cells] == [("full", None), ("gkv", 48), ("rkv", 48), ("gkv", 0.25)]
    share = cell(table, "gkv", 0.25)
    assert share.score.questions == 32
    assert (share.against.baseline, share.against.judged.verdict) == ("full", "worse")
    assert "0.100 at 48, 0.100 at 25%" in table.notes[0]
    (data,) = (d for d in block(table).data() if d["budget_share"])
    assert (data["budget"], data["budget_share"]) == (None, 0.25)
    printed = text(ScoreReport.make(load([run])))
    assert " 25%  " in printed
    same_budget = one(run, "gkv")
    assert cell(same_budget, "rkv", 48).against is not None
    assert cell(same_budget, "gkv", 0.25).against is None


def test_a_method_without_a_budget_that_evicts_is_not_the_full_cache(make_run: Callable, rows: Callable) -> None:
    table = one(make_run("r1", rows("full", None, GOOD), rows("tova", None, BAD, options={"form": "native"})))
    other = cell(table, "tova(form=native)")
    assert other.evicts
    assert other.of_full
    assert other.of_full["bytes"] == pytest.approx(0.25)
    assert other.against is not None
    assert other.against.baseline == "full"


def test_compression_and_prefill_are_not_mixed(make_run: Callable, rows: Callable) -> None:
    full = rows("full", None, GOOD)
    old = make_run("old", rows("gkv", 48, GOOD, compress="query-aware", prefill="full"))
    same = make_run("same", rows("rkv", 48, GOOD, compress="query-aware", prefill="full"), full)
    assert [c.method for c in make_tables(load([old, same]))[0].cells] == ["full", "gkv", "rkv"]
    other = make_run("other", rows("tova", 48, GOOD, compress="query-agnostic", prefill="full"), full)
    with pytest.raises(UserError, match="old has compression query-aware and other has compression query-agnostic"):
        load([old, other])
    tables = make_tables(load([old, other], ["compress"]))
    assert [[c.method for c in t.cells] for t in tables] == [["full", "tova"], ["full", "gkv"]]
    chunked = make_run("chunked", rows("h2o", 48, GOOD, prefill="chunked", prefill_chunk=64))
    with pytest.raises(UserError, match="prefill full and chunked has prefill chunked"):
        load([same, chunked])


def test_a_damaged_run_is_left_out_unless_it_was_named(make_run: Callable, rows: Callable, monkeypatch, capsys) -> None:
    good, bad = make_run("good", rows("gkv", 48, GOOD)), make_run("bad", rows("rkv", 48, GOOD))
    monkeypatch.chdir(good.parent.parent)
    assert main(["report", "--require-complete"]) == 0
    (bad / "run.json").write_text("{")
    loaded = load([good, bad], skip=True)
    assert [run["run"] for run in loaded.runs] == ["good"]
    assert len(loaded.notices) == 1
    assert loaded.notices[0].startswith("run 'bad' is left out: ")
    assert (main(["report"]), main(["report", "--require-complete"])) == (0, 4)
    assert "error: unreadable runs: 1 of 2; the warnings state the causes." in capsys.readouterr().err
    with pytest.raises(KVBenchError, match="is damaged"):
        load([good, bad])
    with pytest.raises(UserError, match="no run can be read"):
        load([bad], skip=True)


def test_a_method_that_is_not_installed_shows_the_options_that_vary(make_run: Callable, rows: Callable) -> None:
    one_kind = make_run("r1", rows("mine", 48, GOOD, options={"a": 1, "b": 2}))
    assert [c.method for c in one(one_kind).cells] == ["mine"]
    assert one(one_kind, "mine").cells
    other = make_run("r2", rows("mine", 48, BAD, options={"a": 1, "b": 3}))
    assert [c.method for c in make_tables(load([one_kind, other]))[0].cells] == ["mine(b=2)", "mine(b=3)"]


def test_a_cell_without_answers_has_no_note_on_idle_methods(make_run: Callable, rows: Callable) -> None:
    idle = [row | {"entries_after_evict": None} for row in rows("gkv", 48, GOOD)]
    none = [row | {"status": "nan_logits", "score": None, "score_partial": None} for row in idle]
    notes = [" ".join(one(make_run(name, given)).notes) for name, given in (("idle", idle), ("none", none))]
    assert ["These cells evicted nothing" in note for note in notes] == [True, False]


def test_a_note_names_an_idle_method_without_a_budget(make_run: Callable, rows: Callable) -> None:
    idle = [row | {"entries_after_evict": None, "interval": 32} for row in rows("rpc", None, GOOD)]
    [note] = [note for note in one(make_run("r", idle)).notes if note.startswith("These cells evicted nothing")]
    assert " at ." not in note
