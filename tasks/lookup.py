"""`lookup`: many facts and a question that names some of them: plain retrieval from the prompt.

Cells: lookup-8 (default), lookup-1. The headline is the share of the asked keys whose value is right; exact match,
all keys and nothing else, stands beside it.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.taskkit.synthetic_task import SyntheticTask, cell_names


@tasks.register("lookup")
class Lookup(SyntheticTask):
    summary = "values of eight keys out of sixteen facts: retrieval (built-in model)"
    variants = cell_names("lookup")
