"""`walk`: a short prompt with ten facts, each needed again and again during a long generation.

Cells: orbit-300 (default), orbit-300f (with filler: separates the strong methods), orbit-100 (smoke), lines-30
(hard). The headline is the share of steps right, read against its floor; exact match stands beside it. Rankings on
the built-in model need not carry over to real ones: its trace has ten symbols, which favours methods that drop
near-duplicates.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, cell_names


@tasks.register("walk")
class Walk(SyntheticTask):
    summary = "facts read once, needed again and again in a long generation (built-in model)"
    variants = cell_names("walk")
