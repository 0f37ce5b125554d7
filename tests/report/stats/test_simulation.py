"""The committed tables of results/statistics keep the promised ranges, and a few settings repeat with fewer tables.

A share keeps a range if twice its standard error reaches into it.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.support.simulate import DESIGNS, MEANS, MORE, Setting, coverage, false_alarms, most_alarms, power

TABLES = Path(__file__).parents[3] / "results" / "statistics"
LOPSIDED = [name for name, sizes in DESIGNS.items() if max(sizes) >= 30]
FEW = 300  # tables of a repetition
ROUNDED = 1e-4  # the tables have four places


def lines(kind: str) -> list[dict[str, str]]:
    with (TABLES / f"{kind}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def outside(line: dict[str, str], low: float, high: float) -> bool:
    share, error = float(line["share"]), float(line["error"])
    return share + error < low - ROUNDED or share - error > high + ROUNDED


def test_false_alarms_keep_their_range_or_no_test_could() -> None:
    made = lines("false-alarms")
    assert {line["design"] for line in made} == set(DESIGNS)
    for line in made:
        rare = float(line["at_most"]) < 0.035
        assert not outside(line, 0 if rare else 0.035, 0.065), line
        assert not (rare and float(line["mean"]) == 0.5), line


def test_families_have_no_more_false_alarms_than_one_comparison() -> None:
    assert not [line for line in lines("families") if outside(line, 0, 0.05)]


def test_the_power_at_the_printed_drop_keeps_its_range_unless_the_drop_takes_the_score() -> None:
    """A drop of nine tenths of the score leaves hardly any right answers, nor their noise."""
    judged = 0
    for line in lines("power"):
        if line["share"] != MORE and float(line["drop"]) < 0.9 * float(line["mean"]):
            assert not outside(line, 0.78, 0.82), line
            judged += 1
    assert judged >= 30


def test_intervals_cover_and_are_wider_only_for_unequal_clusters() -> None:
    for line in lines("coverage"):
        if float(line["mean"]) in MEANS:
            unequal = len(set(DESIGNS[line["design"]])) > 1
            assert not outside(line, 0.93, 1.0 if unequal else 0.97), line


@pytest.mark.parametrize(("differ", "rate"), [(0, 0.0), (4, 0.0), (5, 1 / 16), (6, 2 / 32), (7, 4 / 64)])
def test_fewer_than_five_differences_raise_no_alarm(differ: int, rate: float) -> None:
    assert most_alarms(differ) == rate


@pytest.mark.parametrize("agree", [0.0, 1.0])
@pytest.mark.parametrize("design", LOPSIDED)
def test_very_unequal_clusters_in_few_tables(design: str, agree: float) -> None:
    draw, setting = np.random.default_rng(19), Setting(design, 0.5, agree)
    assert 0.01 <= false_alarms(setting, FEW, draw)["share"] <= 0.1
    assert coverage(setting, FEW, draw)["share"] >= 0.88
    assert 0.72 <= power(setting, 1, FEW, draw)["share"] <= 0.89


@pytest.mark.parametrize("mean", [0.01, 0.99])
@pytest.mark.parametrize("design", [name for name in DESIGNS if name != "30 questions"])
def test_means_near_the_edge_in_few_tables(design: str, mean: float) -> None:
    draw, setting = np.random.default_rng(20), Setting(design, mean)
    found = false_alarms(setting, FEW, draw)
    assert found["share"] <= found["at_most"] + 0.04
    assert coverage(setting, FEW, draw)["share"] >= 0.88
