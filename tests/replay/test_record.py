"""``kvbench record``: the decisions of a run, read again from its stored answers, and how the page shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.replay.decisions import _dropped, cell_of, check_method
from kvbench.runner.cell import MethodState
from kvbench.runner.method_source import source_of
from kvbench.runner.workload import version
from kvbench.store import decisions, read_rows
from kvbench.store.identity import canonical_json

RUN = "run --method full,gkv,h2o,snapkv --budget 34,50% --task walk/orbit-100,lookup --limit 2 --interval 16 -q"
NATIVE_OPTIONS = "--method-opt form=native --method-opt P=16 --method-opt R=8"
SESSION = {
    "run": f"{RUN} --run-name r1",
    "record": "record r1",
    "unknown": "record r1 --sample none",
    "report": "report results/r1 --html page.html",
    "memory": "report results/r1 --memory --html other.html",
    "agnostic": f"{RUN} --compress query-agnostic --task walk/orbit-100 --limit 1 --run-name r2",
    "refused": "record r2",
    "replayed": "replay --run r2 --method gkv --budget 34",
    "compared": "compare r2 --save kept.json --replay",
    "full": "run --method full --task walk/orbit-100 --limit 1 --run-name r3 -q",
    "nothing": "record r3",
    "own": f"run --method rpc {NATIVE_OPTIONS} --task walk/orbit-300 --limit 1 --run-name r4 -q",
    "unbudgeted": "record r4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def session(folder: Path, calls: Callable[..., Any]) -> dict[str, Any]:
    return dict(zip(SESSION, calls(folder, [(line.split(), {}) for line in SESSION.values()])))


def test_every_cell_of_the_first_questions_is_recorded(session: dict[str, Any], folder: Path) -> None:
    assert session["record"].code == 0, session["record"].err
    rows = read_rows(folder / "results" / "r1").set_index("row_key")
    found = list(decisions.read(folder / "results" / "r1"))
    recorded = rows.loc[list({d.row_key for d in found})]
    assert sorted(set(recorded["task"])) == ["lookup", "walk/orbit-100"]
    assert set(recorded["method"]) == {"gkv", "h2o", "snapkv"}
    assert len(recorded) == 2 * 3 * 2
    assert recorded.groupby("task")["doc_id"].nunique().tolist() == [1, 1]
    assert "not recorded" not in session["record"].err


def test_what_is_held_is_what_the_run_measured(session: dict[str, Any], folder: Path) -> None:
    """After each eviction the heads hold the run's entries on average; the largest of these counts is in the row."""
    rows = read_rows(folder / "results" / "r1").set_index("row_key")
    found = list(decisions.read(folder / "results" / "r1"))
    for key in {d.row_key for d in found}:
        heads = [d for d in found if d.row_key == key]
        row = rows.loc[key]
        assert heads[0].seen[0] == row["first_eviction"]
        assert row["evictions"] - len(heads[0].seen) in (0, 1)
        assert heads[0].prompt == row["prompt_tokens"]
        held = [
            sum(not 0 < dropped <= number for d in heads for dropped in d.dropped[:read]) / len(heads)
            for number, read in enumerate(heads[0].seen, 1)
        ]
        assert max(held) == row["entries_after_evict"]


def test_the_page_shows_them(session: dict[str, Any], folder: Path) -> None:
    assert session["report"].code == 0, session["report"].err
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "Recorded for 12 answers" in page
    assert '"heads":{"0.0":"' in page


def test_the_page_is_of_scores_only(session: dict[str, Any], folder: Path) -> None:
    assert session["memory"].code == 2
    assert "--html writes a page of the report of scores; leave out --memory." in session["memory"].err
    assert not (folder / "other.html").exists()


def test_what_cannot_be_recorded_is_said(session: dict[str, Any]) -> None:
    assert session["unknown"].code == 2
    assert "nothing to record for --sample 'none', because the run has no question" in session["unknown"].err
    for case in ("refused", "replayed", "compared"):
        assert session[case].code == 2
        assert "r2' has --compress query-agnostic, but kvbench can read answers again only with" in session[case].err
    assert session["nothing"].code == 2
    assert "run 'r3' has no eviction to record." in session["nothing"].err


def test_the_eviction_that_dropped_a_token() -> None:
    kept = {4: {0, 2, 3}, 6: {0, 3, 5}}
    assert _dropped(kept, [4, 6], 7) == [0, 1, 2, 0, 2, 0, 0]
    assert _dropped({6: {5}}, [4, 6], 7) == [2, 2, 2, 2, 2, 0, 0]


NATIVE = MethodChoice(name="rpc", options=(("form", "native"),))
CONFIG = RunConfig(
    model="tiny",
    grids=(Grid(methods=(MethodChoice(name="gkv"), NATIVE), tasks=("walk",), budgets=(1, 1.0)),),
)


def row(method: str, **changes: Any) -> dict[str, Any]:
    """A row of gkv at one entry, or with changes."""
    options = canonical_json(choose.make(method, {}).options())
    made = {"method": method, "task": "walk", "options": options, "budget": 1, "budget_share": None, "interval": None}
    own = choose.make(method, {})
    made |= {"method_version": version(method), "method_source": source_of(own).hash, "artefacts": None}
    return made | changes


def test_a_row_chooses_among_the_cells_of_the_configuration() -> None:
    assert cell_of(row("gkv"), CONFIG).budget == 1
    share = cell_of(row("gkv", budget=40, budget_share=1.0), CONFIG).budget
    assert (type(share), share) == (float, 1.0)
    native = canonical_json(choose.make("rpc", {"form": "native"}).options())
    assert cell_of(row("rpc", options=native, budget=None), CONFIG).method == NATIVE


@pytest.mark.parametrize(
    "changes",
    [
        {"options": "[1]"},
        {"options": '{"alpha":"x"}'},
        {"options": "{"},
        {"options": None},
        {"budget": None},
        {"budget": 2},
        {"method": "no-such-method"},
        {"method": "h2o"},
    ],
)
def test_a_row_that_the_run_did_not_plan_is_left_out(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no cell with this row's method"):
        cell_of(row("gkv") | changes, CONFIG)


@pytest.mark.parametrize("column", ["method_version", "method_source", "artefacts"])
def test_a_row_of_another_state_of_the_method_is_left_out(column: str) -> None:
    method = choose.make("gkv", {})
    state = MethodState(method=method, version=version("gkv"), source=source_of(method), artefacts=None)
    check_method(row("gkv"), state)
    with pytest.raises(UserError, match=f"the method has changed: {column} was 'other' in the run"):
        check_method(row("gkv") | {column: "other"}, state)


def test_a_method_without_a_budget_is_recorded(session: dict[str, Any], folder: Path) -> None:
    assert session["own"].code == 0, session["own"].err
    assert session["unbudgeted"].code == 0, session["unbudgeted"].err
    assert list(decisions.read(folder / "results" / "r4"))
