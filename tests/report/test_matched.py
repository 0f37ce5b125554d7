"""``report --matched``: what protection adds, what scoring adds, both paired over questions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbench.report.load import load
from kvbench.report.matched_report import MatchedReport
from kvbench.report.render import FORMATS

P = {"protection": "prompt+recent=16"}
OWN = {"gkv": [0.5, 0.25, 1.0, 0.5] * 4, "random": [0.25, 0.0, 0.5, 0.25] * 4}
MATCHED = {"gkv": [0.75, 0.5, 1.0, 0.75] * 4, "random": [0.75, 0.5, 0.75, 0.75] * 4}


@pytest.fixture
def shown(make_run: Callable, rows: Callable) -> MatchedReport:
    parts = [rows(method, 48, scores) for method, scores in OWN.items()]
    parts += [rows(method, 48, scores, options=P) for method, scores in MATCHED.items()]
    parts.append(rows("knorm", 48, [0.5] * 16, options=P))  # without rows under its own protection
    return MatchedReport.make(load([make_run("r", *parts, rows("full", None, [1.0] * 16))]))


def test_the_two_effects_are_differences_of_question_means(shown: MatchedReport) -> None:
    (table,) = shown.data()["tables"]
    assert (table["task"], table["protection"]) == ("walk", "prompt+recent=16")
    lines = {line["method"]: line for line in table["cells"]}
    assert set(lines) == {"gkv", "random", "knorm"}
    gkv = lines["gkv"]
    assert (gkv["own"], gkv["matched"]) == (0.5625, 0.75)
    assert gkv["protection_adds"] == pytest.approx(0.75 - 0.5625)
    assert gkv["scoring_adds"] == pytest.approx(0.75 - 0.6875)
    assert gkv["own_scoring"] == pytest.approx(0.5625 - 0.25)
    assert gkv["scoring_adds_low"] < gkv["scoring_adds"] < gkv["scoring_adds_high"]
    assert lines["random"]["scoring_adds"] is None
    assert lines["random"]["protection_adds"] == pytest.approx(0.6875 - 0.25)
    assert lines["knorm"]["own"] is None
    assert lines["knorm"]["verdict"] == "worse"


def test_every_format_and_the_figure(shown: MatchedReport) -> None:
    for form in FORMATS.values():
        assert "gkv" in form(shown)
    assert "knorm" in FORMATS["text"](shown)
    (figure,) = shown.figures()
    values = figure.spec["data"]["values"]
    assert {(v["panel"], v["bar"]) for v in values} == {
        ("scoring, budget 48", "gkv"), ("scoring, budget 48", "knorm"),
        ("protection, budget 48", "gkv"), ("protection, budget 48", "random"),
    }  # fmt: skip


def test_groups_are_told_apart(make_run: Callable, rows: Callable) -> None:
    cells = [
        rows(method, 48, scores, interval=interval, options=P)
        for interval in (32, 64)
        for method, scores in MATCHED.items()
    ]
    shown = MatchedReport.make(load([make_run("r", *cells)]))
    assert [(line["group"], line["interval"]) for line in shown.lines()[::2]] == [
        ("interval 32", 32),
        ("interval 64", 64),
    ]
    titles = [figure.title.rpartition(": ")[2] for figure in shown.figures()]
    assert titles == [f"walk, interval {interval}, prompt+recent=16" for interval in (32, 64)]
    assert all(figure.caption.endswith("over n = 16 questions; model tiny.") for figure in shown.figures())


def test_runs_without_such_rows_get_the_command(make_run: Callable, rows: Callable) -> None:
    shown = MatchedReport.make(load([make_run("r", rows("gkv", 48, [1.0, 0.0]))]))
    assert "kvbench run --protect own --protect prompt+recent=64" in " ".join(FORMATS["text"](shown).split())


def test_without_random_the_report_says_what_is_unknown(make_run: Callable, rows: Callable) -> None:
    shown = MatchedReport.make(load([make_run("r", rows("gkv", 48, [1.0, 0.0, 1.0], options=P))]))
    assert "what scoring adds is not known" in " ".join(FORMATS["text"](shown).split())


def test_two_methods_under_different_protections_are_left_out(make_run: Callable, rows: Callable) -> None:
    both = {"snapkv.protection": "sinks=4+recent=32", "gkv.protection": "sinks=4+recent=32"}
    same = rows("snapkv+gkv", 48, [1.0, 0.0, 1.0], options=both)
    one = rows("snapkv+gkv", 64, [1.0, 0.0, 1.0], options=both | {"gkv.protection": "recent=20"})
    (table,) = MatchedReport.make(load([make_run("r", same, one)])).data()["tables"]
    assert table["protection"] == "sinks=4+recent=32"
    assert [line["budget"] for line in table["cells"]] == [48]


def test_random_with_options_stands_for_chance_where_no_other_is(make_run: Callable, rows: Callable) -> None:
    chance = [rows("random", 48, [0.0, 0.0, n], options=P | {"prompt": p}) for n, p in ((1.0, "all"), (0.0, "cap"))]
    scored = rows("gkv", 48, [1.0, 0.0, 1.0], options=P)
    (table,) = MatchedReport.make(load([make_run("r", scored, *chance)])).data()["tables"]
    adds = {line["method"]: line["scoring_adds"] for line in table["cells"]}
    assert adds == {
        "gkv": pytest.approx(1 / 3), "random(prompt=all)": None, "random(prompt=cap)": pytest.approx(-1 / 3),
    }  # fmt: skip


def test_cells_that_evicted_nothing_or_are_not_bounded_are_marked(make_run: Callable, rows: Callable) -> None:
    idle = rows("snapkv", 48, [1.0, 0.0, 1.0], options=P)
    for row in idle:
        row |= {"entries_after_evict": None, "decode_bounded": False}
    busy = rows("gkv", 48, [1.0, 0.0, 1.0], options=P)
    text = " ".join(FORMATS["text"](MatchedReport.make(load([make_run("r", idle, busy)]))).split())
    assert "These cells evicted nothing, so their answers are the full cache's: snapkv at 48." in text
    assert "snapkv *" in text
    assert "* generated entries are not bounded by the budget" in text
