"""Budgets: whole numbers of KV entries per layer and KV head (512), or shares of each prompt (0.25, written 25%).

A share is a float and a number of entries an int. ``==`` confuses 1 and 1.0; `order` and `label` do not.
"""

from __future__ import annotations

import math

Budget = int | float


def entries(budget: Budget, prompt_tokens: int) -> int:
    """A budget in entries for a prompt of this length; at least one."""
    if not isinstance(budget, float):
        return budget
    return max(1, math.floor(budget * prompt_tokens + 0.5))


def label(budget: Budget) -> str:
    """``512`` or ``25%``, as the user types it."""
    return f"{budget * 100:.10g}%" if isinstance(budget, float) else str(budget)


def order(budget: Budget) -> tuple[bool, Budget]:
    """Sort key: numbers of entries first, then shares, each by size."""
    return isinstance(budget, float), budget
