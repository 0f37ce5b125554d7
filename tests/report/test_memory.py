"""Memory: nominal and measured bytes by hand, what exceeds is marked, what is not bounded says so."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.load import load
from kvbench.report.memory import PAGE, MemoryCell, MemoryReport
from kvbench.report.page import html as page
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport

ENTRY = 2 * (8 + 8) * 4  # keys and values in both heads of one layer
LAYER = {"kv_heads": 2, "head_dim": 8, "value_dim": 8, "window": None}
CACHE = {"element_bytes": 4, "layers": [LAYER, LAYER]}
SCORES = [1.0, 0.5, 0.25, 1.0]
LENGTHS = {"prompt_tokens": 46, "output_tokens": 300, "max_new_tokens": 320, "kv_bytes_prefill_peak": 9_000}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def measured(rows: Callable) -> Callable:
    """measured("gkv", 48, entries=80, beside=100) -> rows that held so many entries in both layers."""

    def make(method: str, budget: int | None, entries: float, beside: int = 0, **changes: Any) -> list[dict[str, Any]]:
        size = {"entries_peak": entries, "kv_bytes_peak": int(entries * 2 * ENTRY) + beside, "kv_bytes_extra": beside}
        return rows(method, budget, SCORES, **LENGTHS | size | changes)

    return make


def cells(path: Path) -> dict[str, MemoryCell]:
    (table,) = MemoryReport.make(load([path])).tables
    return {cell.method: cell for cell in table.cells}


def test_ratio_is_measured_over_nominal_keys_and_values(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("full", None, 345), measured("gkv", 48, 76, beside=1_216), kv_cache=CACHE)
    full, gkv = cells(run)["full"], cells(run)["gkv"]
    assert (gkv.nominal_entries, gkv.entries_peak) == (48 + 32, 76)
    assert (gkv.nominal_bytes, gkv.measured_bytes) == (80 * 2 * ENTRY, 76 * 2 * ENTRY)
    assert gkv.ratio == pytest.approx(76 / 80)
    assert gkv.beside_share == pytest.approx(1_216 / (76 * 2 * ENTRY))
    assert gkv.allowed_bytes == pytest.approx(1.05 * 80 * 2 * ENTRY + 16 * 2 * ENTRY)
    assert gkv.reading_bytes == 9_000
    assert (full.nominal_entries, full.ratio) == (46 + 300 - 1, 1.0)
    assert not full.over


def test_a_sequence_never_names_more_than_its_tokens(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("gkv", 48, 64, prompt_tokens=40, output_tokens=25), kv_cache=CACHE)
    assert cells(run)["gkv"].nominal_entries == 64


@pytest.mark.parametrize(("entries", "slack", "over"), [(80, 0, False), (80, 20, False), (85, 0, True), (80, 21, True)])
def test_what_exceeds_is_marked(make_run: Callable, measured: Callable, entries: int, slack: int, over: bool) -> None:
    """20 entries are 5% of 80 and a page; entries themselves get no page."""
    changes = {"kv_bytes_peak": (entries + slack) * 2 * ENTRY}
    run = make_run("r1", measured("gkv", 48, entries, **changes), measured("tova", 48, 80), kv_cache=CACHE)
    found = cells(run)
    assert found["gkv"].over is over
    assert not found["tova"].over
    report = MemoryReport.make(load([run]))
    for name in ("text", "markdown"):
        lines = [line for line in FORMATS[name](report).splitlines() if "gkv" in line]
        assert any(" !" in line for line in lines) is over


def test_one_sample_that_exceeds_marks_its_cell(make_run: Callable, measured: Callable) -> None:
    part = measured("gkv", 48, 80)
    part[2] |= {"entries_peak": 100.0, "kv_bytes_peak": 100 * 2 * ENTRY}
    found = cells(make_run("r1", part, kv_cache=CACHE))["gkv"]
    assert found.over
    assert found.ratio == found.largest_ratio == pytest.approx(100 / 80)


def test_the_sample_that_held_most_stands_for_its_cell(make_run: Callable, measured: Callable) -> None:
    part = measured("snapkv", 48, 340, prompt_tokens=136, decode_bounded=False)
    part[1] |= {"output_tokens": 11, "entries_peak": 60.0, "kv_bytes_peak": 60 * 2 * ENTRY}
    found = cells(make_run("r1", part, kv_cache=CACHE))["snapkv"]
    assert (found.entries_peak, found.ratio) == (340, pytest.approx(340 / 347))
    assert found.largest_ratio == pytest.approx(60 / 58)


def test_prompt_only_methods_are_starred_and_never_marked(make_run: Callable, measured: Callable) -> None:
    run = make_run(
        "r1", measured("snapkv", 48, 400, prompt_tokens=136, decode_bounded=False), measured("gkv", 48, 80),
        kv_cache=CACHE,
    )  # fmt: skip
    snapkv = cells(run)["snapkv"]
    assert snapkv.nominal_entries == 48 + 299
    assert snapkv.ratio == pytest.approx(400 / 347)
    assert not snapkv.over
    shown = FORMATS["text"](MemoryReport.make(load([run])))
    assert "snapkv *" in shown
    assert "gkv *" not in shown


def test_a_question_behind_the_compression_is_not_judged(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("gkv", 48, 100, compress="query-agnostic"), kv_cache=CACHE)
    assert not cells(run)["gkv"].over


TALK = {"multi_turn_cache": "keep", "prompt_tokens": 20, "output_tokens": 30}


def test_later_questions_of_a_conversation_count(make_run: Callable, measured: Callable) -> None:
    """20 tokens of the first question, 30 of both answers, 40 of the second question: a sequence of 89, as the full
    cache held. A method that never reached its budget held as much.
    """
    parts = measured("full", None, 89, **TALK), measured("gkv", 128, 89, **TALK), measured("tova", 48, 80, **TALK)
    prompt_only = measured("snapkv", 10, 79, decode_bounded=False, **TALK)
    found = cells(make_run("r1", *parts, prompt_only, kv_cache=CACHE))
    nominal = {"full": 89, "gkv": 89, "tova": 48 + 32, "snapkv": 10 + 69}
    assert {name: cell.nominal_entries for name, cell in found.items()} == nominal
    assert {cell.ratio for cell in found.values()} == {1.0}
    assert not any(cell.over for cell in found.values())


def test_what_exceeds_in_a_conversation_is_marked(make_run: Callable, measured: Callable) -> None:
    parts = measured("full", None, 89, **TALK), measured("tova", 48, 85, **TALK)
    assert cells(make_run("r1", *parts, kv_cache=CACHE))["tova"].over


def test_each_question_of_a_conversation_has_its_own_length(make_run: Callable, measured: Callable) -> None:
    parts = [measured(m, b, 89, **TALK) for m, b in (("full", None), ("gkv", 128))]
    for part in parts:
        part[0] |= {"entries_peak": 200.0, "kv_bytes_peak": 200 * 2 * ENTRY}
    gkv = cells(make_run("r1", *parts, kv_cache=CACHE))["gkv"]
    assert (gkv.nominal_entries, gkv.over) == (160, True)  # budget + interval; the others are shorter than that
    parts[1][0] |= {"entries_peak": 89.0, "kv_bytes_peak": 89 * 2 * ENTRY}
    assert cells(make_run("r2", *parts, kv_cache=CACHE))["gkv"].largest_ratio == 1.0


def test_a_conversation_without_the_full_cache_is_not_judged(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("gkv", 128, 89, **TALK), kv_cache=CACHE)
    gkv = cells(run)["gkv"]
    assert (gkv.nominal_entries, gkv.over) == (49, False)
    assert "The full cache was not run on these conversations" in FORMATS["text"](MemoryReport.make(load([run])))
    both = make_run("r2", measured("full", None, 89, **TALK), kv_cache=CACHE)
    assert "was not run on these" not in FORMATS["text"](MemoryReport.make(load([run, both])))


@pytest.mark.parametrize(("window", "held"), [(20, 20), (366, 80)])
def test_windows_count_on_both_sides(make_run: Callable, measured: Callable, window: int, held: int) -> None:
    """A window that no sequence outgrows is none: 46 + 320 tokens are the longest."""
    layers = [LAYER, LAYER | {"window": window}]
    bytes_ = (80 + held) * ENTRY
    run = make_run("r1", measured("gkv", 48, 80, kv_bytes_peak=bytes_), kv_cache=CACHE | {"layers": layers})
    assert cells(run)["gkv"].nominal_bytes == bytes_


def test_models_whose_layers_keep_states_say_what_eviction_can_touch(make_run: Callable, measured: Callable) -> None:
    tokens, states = 46 + 300 - 1, 40_000
    layers = [LAYER, LAYER | {"window": 100}]
    keys, ring = tokens * (ENTRY + 2 * 4), 100 * ENTRY  # a position of four bytes in both heads
    share = keys / (keys + ring + states)
    run = make_run("r1", measured("gkv", 48, 80, state_bytes=states), kv_cache=CACHE | {"layers": layers})
    cell = cells(run)["gkv"]
    assert (cell.evictable_share, cell.state_bytes) == (pytest.approx(share), states)
    report, scores = MemoryReport.make(load([run])), ScoreReport.make(load([run]))
    assert json.loads(FORMATS["json"](report))["tables"][0]["cells"][0]["evictable_share"] == pytest.approx(share)
    assert next(csv.DictReader(io.StringIO(FORMATS["csv"](report))))["state_bytes"] == "40000.0"
    (line,) = [line for line in FORMATS["text"](report).splitlines() if line.startswith("gkv")]
    assert line.split()[-1] == f"{share:.0%}"
    line = f"evictable KV: {share:.0%} of a sequence's memory"
    assert all(line in " ".join(FORMATS[kind](r).split()) for kind in ("text", "markdown") for r in (report, scores))
    assert line in html.unescape(page(scores))


def test_models_without_states_or_windows_say_nothing_of_it(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("gkv", 48, 80), kv_cache=CACHE)
    assert cells(run)["gkv"].evictable_share == 1
    for report in (MemoryReport.make(load([run])), ScoreReport.make(load([run]))):
        assert "evictable" not in FORMATS["text"](report) + FORMATS["markdown"](report)


def test_a_run_that_does_not_say_what_an_entry_takes(make_run: Callable, measured: Callable) -> None:
    run = make_run("r1", measured("gkv", 48, 80), kv_bytes_extra=None)
    cell = cells(run)["gkv"]
    assert math.isnan(cell.nominal_bytes)
    assert cell.measured_bytes == 80 * 2 * ENTRY
    assert "the run does not tell the size of an entry" in FORMATS["text"](MemoryReport.make(load([run])))


def test_rows_without_measurements_show_nothing(make_run: Callable, rows: Callable) -> None:
    empty = {"kv_bytes_peak": None, "kv_bytes_extra": None, "entries_peak": None, "prompt_tokens": None}
    report = MemoryReport.make(load([make_run("r1", rows("gkv", 48, SCORES, **empty), kv_cache=CACHE)]))
    (line,) = [line for line in FORMATS["text"](report).splitlines() if line.startswith("gkv")]
    assert line.split() == ["gkv", "48", "-", "-", "-", "-", "-", "-", "-"]


def test_a_method_that_always_failed_keeps_its_line(make_run: Callable, measured: Callable, rows: Callable) -> None:
    lost = {"status": "nan_logits", "score": None, "score_partial": None, "kv_bytes_peak": None, "entries_peak": None}
    failed = [row | lost for row in rows("tova", 48, SCORES)]
    found = cells(make_run("r1", measured("gkv", 48, 80), failed, kv_cache=CACHE))
    assert (found["gkv"].samples, found["tova"].samples) == (4, 0)
    assert math.isnan(found["tova"].measured_bytes)


def test_every_format_has_every_cell_and_order_of_the_other_report(make_run: Callable, measured: Callable) -> None:
    run = make_run(
        "r1", measured("full", None, 345), measured("tova", 96, 128), measured("gkv", 48, 80), kv_cache=CACHE
    )
    report = MemoryReport.make(load([run]))
    document = json.loads(FORMATS["json"](report))
    table = list(csv.DictReader(io.StringIO(FORMATS["csv"](report))))
    names = [cell.method for cell in ScoreReport.make(load([run])).tables[0].cells]
    assert [row["method"] for row in table] == names
    assert [cell["method"] for cell in document["tables"][0]["cells"]] == names
    assert [float(row["ratio"]) for row in table] == [cell.ratio for cell in report.tables[0].cells]


def test_the_page_is_that_of_the_engine() -> None:
    from kvbench.engine.cache import paged

    assert paged.PAGE == PAGE


def test_kept_shares_are_shown_where_a_run_has_images(make_run: Callable, measured: Callable) -> None:
    text = make_run("r1", measured("full", None, 345), measured("gkv", 48, 76), kv_cache=CACHE)
    (shown,) = MemoryReport.make(load([text])).blocks()
    assert "images kept" not in [column.header for column in shown.grids[0]]
    kept = {"kept_text": 0.25, "kept_images": 0.125, "images": 1}
    seen = make_run("r2", measured("full", None, 345), measured("gkv", 48, 76, **kept), kv_cache=CACHE)
    assert (cells(seen)["gkv"].kept_text, cells(seen)["gkv"].kept_images) == (0.25, 0.125)
    assert math.isnan(cells(seen)["full"].kept_images)
    (shown,) = MemoryReport.make(load([seen])).blocks()
    assert "images kept" in [column.header for column in shown.grids[0]]
