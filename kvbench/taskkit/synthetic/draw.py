"""Random choices that are the same on every machine and in every Python version.

Python promises the same numbers in every version only for `random.Random.random` (not for `shuffle` and `sample`), so
every method here uses that call alone. Not for cryptography, and too slow for bulk numeric work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A generator of random choices; its key determines all of them."""

    __slots__ = ("_random",)

    def __init__(self, *key: object) -> None:
        self._random = random.Random(":".join(map(str, key))).random

    def below(self, n: int) -> int:
        """Return a whole number in 0 .. n - 1."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """Return a whole number in low .. high, both included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, p: float) -> bool:
        return self._random() < p

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def weighted(self, shares: dict[T, float]) -> T:
        """Return a random key of `shares`; its probability is proportional to its value in `shares`."""
        left = self._random() * sum(shares.values())
        for item, share in shares.items():
            left -= share
            if left < 0:
                return item
        return item  # reached only if rounding leaves a share of the sum

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """Return `k` different items in random order (a partial Fisher-Yates shuffle). Raises ValueError if there are
        fewer than `k` items."""
        pool = list(items)
        if k > len(pool):
            raise ValueError(f"cannot draw {k} different items out of {len(pool)}")
        for i in range(k):
            j = i + int(self._random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:k]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.sample(items, len(items))
