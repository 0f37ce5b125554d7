"""A block of the report with what the page's filters need: whose line each is.

for line in lines(block): line.method, line.budget, line.texts
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.eviction.budget import named
from kvbench.report.blocks import Block
from kvbench.report.page.scored import title

VERDICTS = ("better", "worse", "tied", "unclear", "cannot tell", "unknown")
_VERDICT = re.compile(rf"\b({'|'.join(VERDICTS)})\b")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a block: the cell it is about, and its task where the block has several."""

    task: str
    method: str
    budget: str
    verdict: str
    line: Any


def lines(block: Block) -> Iterator[Line]:
    for line in block.lines:
        cell = _cell(line)
        against = getattr(cell, "against", None)
        table = getattr(line, "table", None)
        yield Line(
            title(table) if table is not None else "",
            cell.method,
            named(cell.budget),
            against.judged.verdict if against else "",
            line,
        )


def verdict_in(text: str) -> str:
    """The verdict that a cell of a table states, as the name of a class; empty without one."""
    found = _VERDICT.search(text)
    return found[1].replace(" ", "-") if found else ""


def _cell(line: Any) -> Any:
    """The cell of a line: of a place in an overview, the first of a method's cells, or the line itself."""
    if isinstance(line, Mapping):
        return next(iter(line.values()))
    return getattr(line, "cell", line)
