"""Finds the task, method, budget and verdicts of each line of a report's block. The filters of the page choose lines by
these values.

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
    """A line of a block, with the task, method, budget and verdicts of its cells. `task`: the title of the task's
    table, as in the page's filter; empty if the block belongs to one task, or if each line covers several tasks.
    `verdicts`: separated by commas; a line that covers several tasks may have several."""

    task: str
    method: str
    budget: str
    verdicts: str
    line: Any


def lines(block: Block) -> Iterator[Line]:
    for line in block.lines:
        cells = _cells(line)
        compared = [against for cell in cells if (against := getattr(cell, "against", None))]
        table = getattr(line, "table", None)
        yield Line(
            title(table) if table is not None else "",
            cells[0].method,
            named(cells[0].budget),
            ",".join(dict.fromkeys(against.judged.verdict for against in compared)),
            line,
        )


def verdict_in(text: str) -> str:
    """Return the CSS class of the verdict in a table's text; empty if the text contains no verdict."""
    found = _VERDICT.search(text)
    return found[1].replace(" ", "-") if found else ""


def _cells(line: Any) -> list[Any]:
    """Return the cells of a line. A line of the overview has a cell per task; every other line has one cell."""
    return list(line.values()) if isinstance(line, Mapping) else [getattr(line, "cell", line)]
