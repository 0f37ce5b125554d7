"""A stream of random choices that is the same on every machine and in every Python version.

    draw = Draw("walk", seed)
    draw.below(10), draw.between(3, 5), draw.chance(0.3), draw.pick(items), draw.sample(items, 4)

Only `random.Random.random` is promised to stay the same between Python versions (`shuffle` and `sample` are not), so
everything here is built on that one call. Not for cryptography, and not fast enough for bulk numeric work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Random choices that are a pure function of the key."""

    __slots__ = ("_random",)

    def __init__(self, *key: object) -> None:
        self._random = random.Random(":".join(map(str, key))).random

    def below(self, n: int) -> int:
        """A whole number in 0 .. n - 1."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """A whole number in low .. high, both included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, p: float) -> bool:
        return self._random() < p

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def weighted(self, shares: dict[T, float]) -> T:
        """One key of `shares`, with a probability proportional to its value."""
        left = self._random() * sum(shares.values())
        for item, share in shares.items():
            left -= share
            if left < 0:
                return item
        return item  # rounding at the very end of the range

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """`k` different items in random order (a partial Fisher-Yates shuffle)."""
        pool = list(items)
        if k > len(pool):
            raise ValueError(f"cannot draw {k} different items out of {len(pool)}")
        for i in range(k):
            j = i + int(self._random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:k]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.sample(items, len(items))
