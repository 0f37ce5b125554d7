"""The tables of docs/protection.md equal results/protection/matched.csv."""

from __future__ import annotations

import csv
import re

import pytest
from support.folders import ROOT

from kvbench.config.layers import read, suites

PAGE = (ROOT / "docs" / "protection.md").read_text(encoding="utf-8")
FILE = ROOT / "results" / "protection" / "matched.csv"
BOTH = ("sinks=4+recent=16", "prompt=50%+recent=16")


def cells() -> dict[tuple[str, ...], dict[str, str]]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return {(r["task"], r["method"], r["protection"], r["budget"]): r for r in csv.DictReader(file)}


@pytest.mark.parametrize("task", ["walk", "chain", "lookup"])
def test_a_table_equals_the_file(task: str) -> None:
    found, table = cells(), PAGE.split(f"\n`{task}`\n\n")[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(lines) == 13
    for name, own, *numbers in lines:
        few, much = (found[task, name.strip("`"), protection, "96"] for protection in BOTH)
        assert [own, *numbers[:2]] == [
            f"{float(few['own']):.3f}",
            f"{float(few['matched']):.3f}",
            f"{float(much['matched']):.3f}",
        ]
        for shown, row in zip(numbers[2:], (few, much)):
            said = [float(number) for number in re.findall(r"[+-][0-9.]+", shown)]
            wanted = [row[f"scoring_adds{end}"] for end in ("", "_low", "_high")] if row["scoring_adds"] else []
            assert said == pytest.approx(list(map(float, wanted)), abs=0.0051)


def test_the_suite_is_what_the_page_says() -> None:
    settings, _ = read(suites()["protection"], "--suite")
    assert settings["protect"].value == ["own", *BOTH]
    assert (len(settings["method"].value), settings["limit"].value, settings["budget"].value) == (13, 64, [64, 96])
    assert len(cells()) == 3 * 13 * 2 * 2
