"""`walk`: a short prompt with ten facts, each of which the model needs again and again during a long generation.

The headline score is the share of steps before the first error; the other score is 1 if the answer stops after the
right number of steps. docs/tasks.md describes the variants.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, variant_names


@tasks.register("walk")
class Walk(SyntheticTask):
    summary = "facts read once, needed again and again in a long generation (built-in model)"
    variants = variant_names("walk")
