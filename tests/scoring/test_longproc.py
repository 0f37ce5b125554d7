"""LongProc's scores against recorded results of the official scorers, on the made rows, and where they differ."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring.longproc.countdown import score_countdown
from kvbench.scoring.longproc.travel_planning import score_plan
from kvbench.scoring.longproc.travel_search import Search, solution
from kvbench.sources.data import Data
from kvbench.taskkit.longproc import LongProc
from kvbench.taskkit.names import get_task

ROWS = (DATA / "scored" / "longproc.jsonl").read_text(encoding="utf-8").splitlines()
SOURCE = Data(DATA / "tasks", env={})


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_goldens(row: dict):
    task = get_task(f"longproc_{row['task']}")
    assert isinstance(task, LongProc)
    assert task.grade(row["text"], task.docs(SOURCE)[0].reference) == row["expected"]


def equations(*lines: str) -> str:
    return "<Solution>\n" + "\n".join(lines) + "\n</Solution>"


@pytest.mark.parametrize(
    "lines",
    [
        ("8 / 0 = 1", "5 - 2 = 3", "24 - 3 = 21"),  # the official script ends with an exception
        ("__import__('os').system('false') = 0", "5 - 2 = 3", "24 - 3 = 21"),  # there, Python would run this
        ("8 + 3 = 11", "5 * 2 = 10"),
        ("8 + 3 = eleven", "5 * 2 = 10", "11 + 10 = 21"),
        ("8 + 3 = 11", "11 - 2 = 9", "9 + 9 = 18"),  # uses 9 twice
    ],
)
def test_equations_that_are_wrong(lines: tuple[str, ...]):
    found = score_countdown(equations(*lines), [8, 3, 5, 2], 21, "")
    assert found == {"accuracy": 0.0, "partial_accuracy": 0.0, "extraction_rate": 1.0}


def test_a_first_line_alone_scores_nothing_rather_than_less():
    search = "Initial\n |- Pick two numbers (1, 2)\n  |- Try 1 + 2 = 3."
    assert score_countdown("# Search Procedure\nInitial", [1, 2], 3, search)["partial_accuracy"] == 0.0


def test_a_trip_that_no_plan_fits():
    rules = [{"type": "duration", "city": city, "num_days": 2} for city in ("Nice", "Bonn")]
    row = {"num_cities": 2, "constraints": rules, "connected_cities": [["Bonn", "Nice"]]}
    assert [visit.city for visit in Search(row).plan] == ["Bonn", "Nice"]
    with pytest.raises(ValueError, match="no trip plan fits"):
        solution(row | {"connected_cities": []})


def test_a_day_of_more_digits_than_python_reads_is_wrong():
    plan = f"<Plan>\nDay 1-{'9' * 5000}: Visiting Nice.\nDay 3: Fly from Nice to Bonn.\n</Plan>"
    found = score_plan(plan, [("Nice", 3), ("Bonn", 2)], "<Solving Procedure>\nNothing.")
    assert found == {"accuracy": 0.0, "partial_accuracy": 0.0, "extraction_rate": 1.0}
