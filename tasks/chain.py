"""`chain`: the prompt holds a plan, and the answer needs each line of the plan exactly once: a test of foresight.

The headline score is the share of the plan's steps that the answer gets right before its first error; the other score
is 1 if the boxed result is right. A comparison on this task alone is unfair to methods that rank by past attention
(`kvbench.taskkit.synthetic.chain`).
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, variant_names


@tasks.register("chain")
class Chain(SyntheticTask):
    summary = "a plan read once, line by line: foresight (built-in model)"
    variants = variant_names("chain")
