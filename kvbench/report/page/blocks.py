"""Finds the task, method, budget and verdict of each line of a report's block. The filters of the page choose lines by
these four values.

    for line in lines(block):
        line.method, line.budget, line.line
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.eviction.budget import named
from kvbench.report.blocks import Block
from kvbench.report.page.matrix import SIGNS
from kvbench.report.page.scored import title

VERDICTS = tuple(SIGNS)
_VERDICT = re.compile(rf"\b({'|'.join(VERDICTS)})\b")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a block, with the task, method, budget and verdict of its cell. `task` is empty if all lines of the
    block have the same task, or if each line covers several tasks."""

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
    """Return the CSS class of the verdict in a table's text; empty if the text contains no verdict."""
    found = _VERDICT.search(text)
    return found[1].replace(" ", "-") if found else ""


def _cell(line: Any) -> Any:
    """Return the cell of a line. For a line of the overview, which has a cell per task, return the first of these
    cells."""
    if isinstance(line, Mapping):
        return next(iter(line.values()))
    return getattr(line, "cell", line)
