"""How many tokens a task's prompts may have, and the search for the largest haystack that fits.

The search works as in NVIDIA's generators. First, a bisection on real draws finds the size of the haystack, in
sentences, words or documents. Then each prompt that turns out too long gets a smaller haystack. If even the smallest
haystack is too large, NVIDIA's generators loop for ever; kvbench raises UserError.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from kvbench.errors import UserError, quote
from kvbench.taskkit.ruler.material import Sources
from kvbench.taskkit.ruler.recipes import SEED, Filled, Row

Item = TypeVar("Item")
DRAWS = 100  # at most so many prompts of the smallest size are drawn; they differ a little in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The number of tokens that a task's prompt and answer may have together; `size` and `fit` search for the largest
    prompts within this number."""

    name: str  # of the task, for messages
    asked: int  # the length in the task's name
    wrapping: int  # tokens of the chat template, or the tokenizer's special tokens without one
    new_tokens: int  # tokens reserved for the answer
    count: Callable[[str], int]  # counts a text's tokens without special tokens

    @property
    def length(self) -> int:
        """Return how many tokens the prompt's text and the answer may have together, without the chat template."""
        return self.asked - self.wrapping

    def tokens(self, prompt: Filled) -> int:
        return self.count(prompt.text) + self.new_tokens

    def size(self, draw: Callable[[int], Filled], step: int, *, extra: int = 0) -> int:
        """Return the largest haystack size whose prompt fits and leaves `extra` tokens free; `step` if no size does.
        draw: makes a prompt of a given size. step: the smallest size that is tried."""
        per_unit = self.count(draw(step).text) / step
        high = max(int((self.length / per_unit) * 3), 2 * step)
        return largest(lambda size: self.tokens(draw(size)) + extra <= self.length, step, high) or step

    def fit(self, draw: Callable[[int], Filled], size: int, step: int, *, needle: bool = False) -> Row:
        """Draw prompts until one fits, and return it.

        The first haystack has size `size`. Each later one is smaller by `step`, until the size is at most `step`; then
        up to `DRAWS` prompts with this last size are drawn. Raises UserError if no prompt fits.

        needle: also count the tokens before the first right answer in the prompt.
        """
        shortest: int | None = None
        draws = 0
        while draws < DRAWS:
            try:
                prompt = draw(size)
            except ValueError:  # haystack too small for the needles; NVIDIA's generators also go on
                pass
            else:
                tokens = self.tokens(prompt)
                if tokens <= self.length:
                    before = self.count(prompt.user.partition(prompt.outputs[0])[0]) if needle else None
                    return Row(prompt=prompt, tokens=tokens + self.wrapping, needle_at=before)
                shortest = min(tokens, shortest or tokens)
            if size > step:
                size -= step
            else:
                draws += 1
        raise self.too_short(shortest)

    def too_short(self, shortest: int | None = None) -> UserError:
        """Return the error that says that all prompts of a task are too long. shortest: tokens of the shortest prompt
        that was drawn, with its answer; None if none was drawn."""
        needed = (shortest or self.new_tokens) + self.wrapping
        enough = 1024
        while enough < needed or enough <= self.asked:
            enough *= 2
        made = f"; the shortest prompt with its answer takes {needed}" if shortest else ""
        return UserError(
            f"task {quote(self.name)} does not fit into {self.asked} tokens with this tokenizer{made}. "
            f"Give the task a greater length, such as @{enough}."
        )


@dataclass(kw_only=True)
class Prompts(ABC):
    """The prompts of a subtask. Random numbers are drawn in the same order as in NVIDIA's generator."""

    room: Room
    material: Sources

    def __post_init__(self) -> None:
        self.random = random.Random(SEED)

    @abstractmethod
    def rows(self, n: int) -> list[Row]:
        """Return the first `n` prompts."""


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest size from `low` to `high` for which `fits` is true; None if it is true for no tried size. The
    search is a bisection, so it assumes that smaller sizes fit too."""
    found = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def shuffled(items: Sequence[Item]) -> list[Item]:
    """Return the items as a new ``random.Random(SEED)`` shuffles them. The order depends on their number only."""
    return [items[i] for i in _order(len(items))]


@lru_cache(maxsize=16)
def _order(count: int) -> list[int]:
    order = list(range(count))
    random.Random(SEED).shuffle(order)
    return order
