"""How long a prompt may be, and how much hay makes it just so long.

The official generators look for the size of the haystack (repeated sentences, words, documents) once, by bisection on
real draws, and then shrink it row by row where a draw comes out too long. Where even the smallest size is too long
they draw for ever; here that is an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from kvbench.errors import UserError, quote
from kvbench.taskkit.ruler.recipes import SEED, Prompt

Item = TypeVar("Item")
DRAWS = 100  # of the smallest size before a row is given up; sizes differ a little from draw to draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a prompt has to fit into, in tokens.

    asked: the length in the task's name. wrapping: the chat template's share. new_tokens: kept for the answer.
    count: tokens of a text without special tokens. name: the task's, for messages.
    """

    name: str
    asked: int
    wrapping: int
    new_tokens: int
    count: Callable[[str], int]

    @property
    def length(self) -> int:
        """Tokens for the text and its answer."""
        return self.asked - self.wrapping

    def tokens(self, prompt: Prompt) -> int:
        return self.count(prompt.text) + self.new_tokens

    def fit(self, build: Callable[[int], Prompt], size: int, step: int) -> tuple[Prompt, int]:
        """The first draw that fits, and its tokens: of `size`, and `step` smaller after each that does not.

        Raises UserError when the smallest size does not fit in `DRAWS` draws.
        """
        shortest: int | None = None
        draws = 0
        while draws < DRAWS:
            try:
                prompt = build(size)
            except ValueError:  # too little hay for the needles; official: tried again like one that is too long
                pass
            else:
                tokens = self.tokens(prompt)
                if tokens <= self.length:
                    return prompt, tokens
                shortest = min(tokens, shortest or tokens)
            if size > step:
                size -= step
            else:
                draws += 1
        raise self.too_short(shortest)

    def too_short(self, shortest: int | None = None) -> UserError:
        """What to raise when no prompt fits. `shortest`: tokens of the shortest that was made."""
        needed = (shortest or self.new_tokens) + self.wrapping
        enough = 1024
        while enough < needed or enough <= self.asked:
            enough *= 2
        made = f"; the shortest prompt takes {needed}" if shortest else ""
        return UserError(
            f"task {quote(self.name)} does not fit into {self.asked} tokens with this tokenizer{made}. "
            f"Take a longer one, such as @{enough}."
        )


def haystack_size(tokens: Callable[[int], int], *, length: int, extra: int, step: int) -> int:
    """The largest size found whose text and `extra` tokens fit into `length`; `step` where none does."""
    per_unit = tokens(step) / step
    high = max(int((length / per_unit) * 3), 2 * step)
    return largest(lambda size: tokens(size) + extra <= length, step, high) or step


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest size from `low` to `high` that fits, by bisection; each size is asked at most once."""
    found = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def shuffled(items: Sequence[Item]) -> list[Item]:
    """In the order of ``random.Random(SEED).shuffle``, which depends on their number alone."""
    return [items[i] for i in _order(len(items))]


@lru_cache(maxsize=16)
def _order(count: int) -> list[int]:
    order = list(range(count))
    random.Random(SEED).shuffle(order)
    return order
