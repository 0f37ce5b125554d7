"""`walk`: a short prompt with ten facts, each of which the model needs again and again during a long generation.

Variants: orbit-300 (default), orbit-300f (with filler sentences: separates the strong methods), orbit-100 (short, for
smoke tests), lines-30 (hard). The headline score is the share of right steps; the other score is exact match. Compare
the headline score with the column `floor`, the share of the steps that come before the first eviction. Rankings on the
built-in model need not hold for real models: the answer consists of ten symbols, which favours methods that drop
near-duplicates.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, variant_names


@tasks.register("walk")
class Walk(SyntheticTask):
    summary = "facts read once, needed again and again in a long generation (built-in model)"
    variants = variant_names("walk")
