"""A report of an unfinished run names the cells that lack rows, counts their rows, and prints the command that
continues the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.commands.report import report as report_command
from kvbench.cli.commands.show import show_
from kvbench.report.load import load
from kvbench.report.page import write
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.store.cells import cell_hash


@pytest.fixture
def half(make_run: Callable, rows: Callable) -> Path:
    """Four cells of four rows each: one complete, two begun (one has a failed row), one without rows."""
    score, shares = [0.5, 0.75, 1.0, 0.25], [{"budget": 10}, {"budget": 12}]
    cells = {
        "walk full": rows("full", None, score),
        "walk gkv @48": rows("gkv", 48, score[:3], options={"lam": 0.5}),
        "walk tova @50%": [row | share | {"budget_share": 0.5} for row, share in zip(rows("tova", 0, score), shares)],
    }
    cells["walk gkv @48"][0] |= {"status": "error", "score": None, "score_partial": None}
    for number, row in enumerate(row for part in cells.values() for row in part):
        row["row_key"] = f"k{number}"
    plans = [_plan(cell, part[0]) for cell, part in cells.items()]
    plans.append(_plan("walk rkv @48", rows("rkv", 48, score)[0]))
    return make_run("half", *cells.values(), planned=16, seal=False, plans=plans)


def _plan(cell: str, row: dict[str, Any]) -> dict[str, Any]:
    options = json.dumps(row["options"], separators=(",", ":"))
    return {"cell": cell, "rows": 4, "hash": cell_hash({"budget_share": None} | row | {"options": options})}


def test_only_unfinished_cells_are_marked_each_with_its_own_rows(half: Path) -> None:
    report = ScoreReport.make(load([half]))
    progress = {cell.method: cell.progress for cell in report.tables[0].cells}
    assert progress == {"full": "", "gkv": "2 of 4 rows", "tova": "2 of 4 rows"}
    document = json.loads(FORMATS["json"](report))
    assert document["unfinished"] == {"half": "8 of 16 rows"}
    assert document["without_rows"] == {"half": ["walk rkv @48"]}


def test_every_format_names_the_cells_without_rows(half: Path, tmp_path: Path) -> None:
    report = ScoreReport.make(load([half]))
    page = write(report, tmp_path / "page.html").read_text()
    for shown in (page, *(FORMATS[name](report) for name in ("text", "markdown", "latex"))):
        said = shown.replace("\\", "")
        assert "Run half is not finished (8 of 16 rows). No rows yet: walk rkv @48." in said
        assert said.count("(2 of 4 rows)") >= 2


def test_a_shard_states_its_rows_only_as_a_whole(make_run: Callable, rows: Callable) -> None:
    """Its record has the rows of the undivided run's cells."""
    part = rows("gkv", 48, [0.5])
    loaded = load([make_run("s", part, planned=2, seal=False, shard="1/2", plans=[_plan("walk gkv @48", part[0])])])
    assert ScoreReport.make(loaded).tables[0].cells[0].progress == "1 of 2 rows"


def test_show_and_report_say_how_to_continue(half: Path, make_run: Callable, rows: Callable, capsys: Any) -> None:
    command = f"kvbench run --resume half --out {half.parent}"
    show_(str(half))
    assert f"\ncontinue  {command}\n" in capsys.readouterr().out
    report_command([str(half)])
    assert f"warning: run 'half' is not finished: 8 of 16 rows; continue with {command}\n" in capsys.readouterr().err
    show_(str(make_run("whole", rows("gkv", 48, [0.5]))))
    assert "continue" not in capsys.readouterr().out
