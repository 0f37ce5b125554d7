"""`chain`: a plan in the prompt of which every line is needed exactly once, later: a test of foresight.

Cells: chain-4 (default), chain-8. Past attention says nothing about the line that comes next, so this is unfair as
the only task for methods that look back. The headline is the share of steps right before the first error; exact match
stands beside it.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, cell_names


@tasks.register("chain")
class Chain(SyntheticTask):
    summary = "a plan read once, line by line: foresight (built-in model)"
    variants = cell_names("chain")
