"""docs/architecture.md shows the floor plan as the layer test holds it, and names files that exist."""

from __future__ import annotations

import re

import pytest
from house.test_layers import FLOORS
from support.folders import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PLAN = [set(floor.split()) for floor in FLOORS.strip().splitlines()]
PATHS = sorted(set(re.findall(r"`((?:kvbench|methods|tasks|tests|docs)/[\w./-]*)`", PAGE)))


def test_the_picture_shows_the_floors() -> None:
    [picture] = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    floors = re.findall(r"subgraph [^\n]*\n(.*?)\n  end", picture, re.DOTALL)
    assert [set(floor.split()) for floor in reversed(floors)] == PLAN


def test_every_room_has_a_line() -> None:
    table = PAGE.partition("## Rooms")[2].partition("## ")[0]
    rooms = re.findall(r"^\| `(?:kvbench/)?(\w+)(?:/|\.py)` \|", table, re.MULTILINE)
    assert sorted(rooms) == sorted(FLOORS.split())


def test_the_numbers_of_rooms_and_floors() -> None:
    assert f"a house of {len(FLOORS.split())} rooms on {len(PLAN)} floors" in PAGE


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()
