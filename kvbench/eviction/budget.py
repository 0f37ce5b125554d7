"""Budgets: whole numbers of KV entries per layer and KV head (512), or shares of each prompt (0.25, written 25%).

A share is stored as a float, and a number of entries as an int. Compare budgets by `order`, `label` or `named`: by
``==``, 1 (one entry) would equal 1.0 (100%).
"""

from __future__ import annotations

import math

Budget = int | float


def entries(budget: Budget, prompt_tokens: int) -> int:
    """Return a budget in entries. A share is multiplied by `prompt_tokens` and rounded to an integer, at least 1."""
    if not isinstance(budget, float):
        return budget
    return max(1, math.floor(budget * prompt_tokens + 0.5))


def label(budget: Budget) -> str:
    """Return a budget as the user types it: ``512`` or ``25%``."""
    return f"{budget * 100:.10g}%" if isinstance(budget, float) else str(budget)


def named(budget: Budget | None) -> str:
    """Return the text that stands for a budget in tables and JSON: its `label`, or ``-`` if there is no budget."""
    return "-" if budget is None else label(budget)


def order(budget: Budget) -> tuple[bool, Budget]:
    """Return a sort key: numbers of entries first, then shares, each by size."""
    return isinstance(budget, float), budget
