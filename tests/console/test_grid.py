"""Tables for a terminal: which columns are narrowed, and where their texts are broken."""

from __future__ import annotations

import pytest

from kvbench.console import terminal

NAME = "snapkv-decode(variant=gkv)+h2o"
ROWS = [
    (NAME, "longbench_e/passage-count", "0.512 ±0.034", "-0.055 (-0.18, +0.07)"),
    ("full", "a" * 40, "1,234,567,890,123", "1e-05"),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def draw(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        terminal.table(("method", "task", "score", "minus full"), ROWS, right=("score", "minus full"))
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return draw


def test_a_table_that_fits_is_not_broken(drawn) -> None:
    head, rule, *lines = drawn(200)
    assert [line.split("  ")[0] for line in lines] == [NAME, "full"]
    assert len(head) == len(rule) == len(lines[0]) == 30 + 40 + 17 + 21 + 3 * 2


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (110, [NAME, "longbench_e/passage-count", "0.512 ±0.034", "-0.055 (-0.18,", "+0.07)", "a" * 40]),
        (100, [NAME, "-0.055", "(-0.18,", "+0.07)", "a" * 40]),
        (80, ["snapkv-decode", "(variant=gkv)+", "h2o", "longbench_e/passage-count", "0.512 ±0.034", "1e-05"]),
        (60, ["snapkv-decode", "(variant=gkv)+", "h2o", "longbench_e/", "passage-count", "1,234,567,890,123", "1e-05"]),
    ],
)
def test_numbers_are_never_broken_and_names_only_where_they_must(drawn, width: int, parts: list[str]) -> None:
    lines = drawn(width)
    cells = [cell.strip() for line in lines for cell in line.split("  ")]
    assert [part for part in parts if part not in cells] == []
    assert max(map(len, lines)) <= width


def test_words_are_broken_before_a_table_grows_wider_than_the_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal.table([f"column{n}" for n in range(8)], [("attention",) * 7 + ("2407.11550",)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert "2407.11550" in out


def test_a_table_that_cannot_be_narrowed_is_wider_than_the_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    numbers = tuple(f"{n}.123456789" for n in range(10))
    terminal.table([f"n{n}" for n in range(10)], [numbers])
    assert capsys.readouterr().out.splitlines()[2].split() == list(numbers)
