"""`lookup`: many facts and a question that names some of them: retrieval from the prompt.

Variants: lookup-8 (default; the question names eight facts), lookup-1. The headline score is the share of the named
keys whose value is right in the answer; the other score is exact match (all keys in order and no other text).
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, variant_names


@tasks.register("lookup")
class Lookup(SyntheticTask):
    summary = "values of eight keys out of sixteen facts: retrieval (built-in model)"
    variants = variant_names("lookup")
