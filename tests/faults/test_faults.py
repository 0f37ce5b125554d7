"""Every fault of data/faults.csv is made to happen, and what the user gets is what the file says.

FAULTS=full repeats as often as the file asks for (N), which takes half an hour; otherwise a few times.
"""

from __future__ import annotations

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
    sharing,
    starting,
    storage,
)
from faults.stage import FAULTS, SCENARIOS, Stage

FILES = (damage, devices, grading, hubs, interrupts, kills, locks, reading, sharing, starting, storage)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["id"])
def test_fault(fault: dict[str, str], stage: Stage) -> None:
    SCENARIOS[fault["id"]](stage)


def test_every_fault_has_a_scenario() -> None:
    ids = [fault["id"] for fault in FAULTS]
    assert ids == [f"F{number:02}" for number in range(1, 33)]
    assert sorted(SCENARIOS) == ids
    assert {function.__module__ for function in SCENARIOS.values()} == {file.__name__ for file in FILES}
