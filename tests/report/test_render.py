"""Formats: equal numbers in all of them, and nothing that a model or a file wrote gets to act."""

from __future__ import annotations

import csv
import html.parser
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.errors import SetupError
from kvbench.report.load import load
from kvbench.report.render import FORMATS, write
from kvbench.report.scores import ScoreReport, block

SCORES = [1.0, 0.5, 0.25, 1.0, 0.75, 0.0, 1.0, 0.5]
ATTACKS = [
    *("<script>alert(1)</script>", "[x](javascript:alert)", "![i](http://x/y)", "a|b", "x`y`", "a\nb"),
    *("=1+1", "@SUM(A1)", "-2+3", "+1", "\tx", "\rx", "\x1b[2Jx", "\u202egnp.exe"),
]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def report(make_run: Callable, rows: Callable) -> ScoreReport:
    run = make_run(
        "r1", rows("full", None, SCORES), rows("gkv", 48, SCORES[::-1]), rows("tova", 48, SCORES), planned=30
    )
    return ScoreReport.make(load([run]))


def test_every_format_has_every_cell(report: ScoreReport) -> None:
    document = json.loads(FORMATS["json"](report))
    table = list(csv.DictReader(io.StringIO(FORMATS["csv"](report))))
    (expected,) = report.tables
    assert document["tables"][0]["cells"] == block(expected).data()
    assert [row["method"] for row in table] == ["full", "gkv", "tova"]
    assert float(table[1]["mean"]) == expected.cells[1].score.mean
    for name in ("text", "markdown"):
        shown = FORMATS[name](report)
        assert all(f"{cell.score.mean:.3f}" in shown for cell in expected.cells)
        assert "24 of 30 rows" in shown


def test_json_is_one_line_without_nan(report: ScoreReport) -> None:
    line = FORMATS["json"](report)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_negative_number_stays_a_number_in_csv(report: ScoreReport) -> None:
    row = list(csv.DictReader(io.StringIO(FORMATS["csv"](report))))[2]
    assert float(row["diff"]) <= 0 or float(row["diff"]) == 0


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_text_is_shown_and_never_acts(make_run: Callable, rows: Callable, attack: str) -> None:
    made = ScoreReport.make(load([make_run("r1", rows(attack, 48, SCORES, task=attack))]))
    for row in csv.reader(io.StringIO(FORMATS["csv"](made))):
        for value in row:
            assert not value.startswith(("=", "@", "\t", "\r"))
            assert not value.startswith(("+", "-")) or value.lstrip("+-").replace(".", "").replace("e-", "").isdigit()
    for name in ("text", "markdown"):
        shown = FORMATS[name](made)
        assert not any(ord(c) < 32 and c != "\n" for c in shown)
        assert "\u202e" not in shown
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    markdown = FORMATS["markdown"](made)
    parser.feed(markdown)
    assert not tags
    assert "](" not in markdown.replace("\\](", "")
    (first,) = [line for line in markdown.splitlines() if line.startswith("| method")][:1]
    columns = first.count(" | ")
    body = markdown.splitlines()[markdown.splitlines().index(first) + 2]
    assert body.replace("\\|", "").count(" | ") == columns


def test_ascii_where_the_terminal_knows_no_more(report: ScoreReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    assert FORMATS["text"](report).isascii()
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


def test_files(report: ScoreReport, tmp_path: Path) -> None:
    paths = write(report, tmp_path / "deep/report")
    assert [p.name for p in paths] == ["report.md", "report.csv", "report.json"]
    assert json.loads(paths[2].read_text())["runs"][0]["run"] == "r1"
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot write the report in"):
        write(report, tmp_path / "file")


def test_a_report_without_lines_is_an_empty_csv() -> None:
    class Empty:
        def lines(self) -> list[dict[str, object]]:
            return []

    assert FORMATS["csv"](Empty()) == ""  # type: ignore[arg-type]
