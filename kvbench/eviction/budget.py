"""Budgets: whole numbers of KV entries per layer and KV head (512), or shares of each prompt (0.25, written 25%).

A share is a float and a number of entries an int, also where both are 1: `order` and `label` tell them apart, ``==``
does not.
"""

from __future__ import annotations

import math

Budget = int | float


def entries(budget: Budget, prompt_tokens: int) -> int:
    """Entries that a budget means for a prompt of this length; at least one."""
    if not isinstance(budget, float):
        return budget
    return max(1, math.floor(budget * prompt_tokens + 0.5))


def label(budget: Budget) -> str:
    """``512`` or ``25%``, as it is typed."""
    return f"{budget * 100:.10g}%" if isinstance(budget, float) else str(budget)


def order(budget: Budget) -> tuple[bool, Budget]:
    """Sorts numbers of entries before shares, each by size."""
    return isinstance(budget, float), budget
