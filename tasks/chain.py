"""`chain`: the model needs every line of a plan in the prompt exactly once, later: a test of foresight.

Variants: chain-4 (default), chain-8. Past attention does not tell which line comes next, so as the only task it is
unfair to methods that use past attention. The headline score is the share of steps before the first error; the other
score is exact match.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, cell_names


@tasks.register("chain")
class Chain(SyntheticTask):
    summary = "a plan read once, line by line: foresight (built-in model)"
    variants = cell_names("chain")
