"""No file of the product has more than 350 lines: whoever opens one can hold it in mind."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.folders import ROOT

LIMIT = 350
FILES = [p for folder in ("kvbench", "methods", "tasks") for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_at_most_350_lines(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LIMIT, f"{path.relative_to(ROOT)} has {lines} lines; split it by noun"
