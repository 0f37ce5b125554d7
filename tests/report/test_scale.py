"""Reports of many rows: within their CPU time, and the same numbers as plain Python finds row by row."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.report_folders import make_run

from kvbench.report.load import load
from kvbench.report.memory import MemoryReport
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.store import read_rows

_MEASURED = """
import resource, sys
from kvbench.cli.app import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, "torch" in sys.modules, "pandas" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def test_20000_rows_cost_little_cpu_and_no_torch(tmp_path: Path) -> None:
    """100,000 rows may take 10 s; a row each as a Python object took 30 s for these."""
    run = make_run(tmp_path / "big", cells=25, questions=800, samples=1)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, "report", str(run), "--format", "json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sum(len(table["cells"]) for table in json.loads(done.stdout)["tables"]) == 25
    seconds, torch, pandas = done.stderr.split()
    assert (torch, pandas) == ("False", "False")
    assert float(seconds) < 10


@pytest.mark.parametrize(("questions", "samples"), [(9, 1), (7, 4)])
def test_every_number_is_that_of_the_rows(tmp_path: Path, questions: int, samples: int) -> None:
    run = make_run(tmp_path / "r", cells=12, questions=questions, samples=samples)
    cells = defaultdict(list)
    for row in read_rows(run).to_dict("records"):
        cells[row["task"], row["method"], None if row["method"] == "full" else int(row["budget"])].append(row)
    found = json.loads(FORMATS["json"](ScoreReport.make(load([run]))))
    shown = {(c["task"], c["method"], c["budget"]): c for table in found["tables"] for c in table["cells"]}
    assert shown.keys() == cells.keys()
    for key, cell in shown.items():
        mine = cells[key]
        expected = _by_hand(mine, cells[key[0], "full", None], cell["headline"])
        assert {name: cell[name] for name in expected} == {name: pytest.approx(v) for name, v in expected.items()}


def _by_hand(rows: list[dict[str, Any]], full: list[dict[str, Any]], headline: str) -> dict[str, Any]:
    """The figures of a cell from its rows, one by one."""
    scores, whole = _by_question(rows, headline), _by_question(full, headline)
    means = {q: statistics.fmean(values) for q, values in scores.items()}
    busy = [row["decode_seconds"] + row["evict_seconds"] for row in rows]
    speed = sum(row["output_tokens"] - 1 for row in rows) / sum(busy)
    figures = {
        "mean": statistics.fmean(means.values()),
        "se": statistics.stdev(means.values()) / math.sqrt(len(means)),
        "score": statistics.fmean(row["score"] for row in rows),
        "questions": len(means),
        "samples": len(rows),
        "truncated": sum(row["stop_reason"] == "length" for row in rows) / len(rows),
        "kv_bytes_peak": statistics.fmean(row["kv_bytes_peak"] for row in rows),
        "kv_bytes_mean": statistics.fmean(row["kv_bytes_mean"] for row in rows),
        "entries_mean": statistics.fmean(row["entries_mean"] for row in rows),
        "entries_peak": max(row["entries_peak"] for row in rows),
        "tokens_per_second": speed,
        "roofline_share": statistics.fmean(row["roofline_share"] for row in rows),
        "evict_share": sum(row["evict_seconds"] for row in rows) / sum(busy),
        "bytes_of_full": sum(r["kv_bytes_peak"] for r in rows) / sum(r["kv_bytes_peak"] for r in full),
    }
    if rows is not full:
        figures["diff"] = statistics.fmean(means[q] - statistics.fmean(whole[q]) for q in means)
    return figures


def _by_question(rows: list[dict[str, Any]], column: str) -> dict[str, list[float]]:
    questions = defaultdict(list)
    for row in rows:
        questions[row["doc_id"]].append(row[column])
    return questions


def test_memory_is_that_of_the_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", cells=8, questions=5, samples=2)
    rows = defaultdict(list)
    for row in read_rows(run).to_dict("records"):
        measured = row["kv_bytes_peak"] - row["kv_bytes_extra"]
        sequence = row["prompt_tokens"] + row["output_tokens"] - 1
        entries = sequence if row["method"] == "full" else min(sequence, row["budget"] + row["interval"])
        key = row["method"], None if row["method"] == "full" else int(row["budget"])
        rows[key].append((measured, measured / (entries * 4 * 2 * 64 * 4)))
    (table,) = MemoryReport.make(load([run])).tables
    assert {(c.method, c.budget) for c in table.cells} == rows.keys()
    for cell in table.cells:
        mine = rows[cell.method, cell.budget]
        assert (cell.measured_bytes, cell.ratio) == pytest.approx(max(mine))
        assert cell.largest_ratio == pytest.approx(max(ratio for _, ratio in mine))
