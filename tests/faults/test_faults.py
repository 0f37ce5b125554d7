"""Every fault of data/faults.csv is made to happen, and what the user gets is what the file says.

FAULTS=full repeats as often as the file asks for (N), which takes half an hour; otherwise a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults import (
    damage,
    devices,
    grading,
    hubs,
    interrupts,
    kills,
    locks,
    reading,
    starting,
    storage,
)
from faults.stage import FAULTS, SCENARIOS, Stage

FILES = (damage, devices, grading, hubs, interrupts, kills, locks, reading, starting, storage)
WAITING = {"F10": "--shard is not there yet", "F11": "--join is not there yet"}


@pytest.mark.parametrize("fault", [f for f in FAULTS if f["id"] not in WAITING], ids=lambda fault: fault["id"])
def test_fault(fault: dict[str, str], stage: Stage) -> None:
    SCENARIOS[fault["id"]](stage)


def test_every_fault_has_a_scenario_or_waits() -> None:
    ids = [fault["id"] for fault in FAULTS]
    assert ids == [f"F{number:02}" for number in range(1, 33)]
    assert sorted(SCENARIOS) == [name for name in ids if name not in WAITING]
    assert {function.__module__ for function in SCENARIOS.values()} == {file.__name__ for file in FILES}


def test_what_waits_is_still_missing(kvbench: Callable, tmp_path: Path) -> None:
    """Once there are options to share a run, their faults need scenarios."""
    for option in ("--shard", "--join"):
        assert f"no option '{option}'" in kvbench("run", option, "1/2", cwd=tmp_path).err
