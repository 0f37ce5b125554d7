"""Frequent words extraction: coded words whose frequencies fall as a zeta distribution; the most frequent is noise.

The official script imports transformers, and with it rich, after it has set the seed, and rich draws one number when it
is imported. The reference rows have it so, therefore one number is drawn and dropped here too.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from kvbench.taskkit.ruler.fit_length import Room, shuffled
from kvbench.taskkit.ruler.recipes import FAMILIES, SEED, Prompt, Row

ALPHA = 2.0
LETTERS = 6
NOISE = "..."


@dataclass(kw_only=True)
class FrequentWords:
    room: Room

    def __post_init__(self) -> None:
        self.random = random.Random(SEED)
        self.random.getrandbits(20)  # rich's
        self.length = self.room.length - self.room.new_tokens

    def rows(self, n: int) -> list[Row]:
        step = self.length // 32
        if self.length // 50 < 4:  # words of the vocabulary: the noise and three answers
            raise self.room.too_short()
        vocabulary, size = self._vocabulary(), self.length // LETTERS
        while self.room.count(_prompt(vocabulary, size).text) < self.length:
            size += step
        size -= step
        return [self._row(self._vocabulary(), size, step) for _ in range(n)]

    def _row(self, vocabulary: list[str], size: int, step: int) -> Row:
        """With `size` words, or fewer where these come out too long."""
        while size > 0:
            prompt = _prompt(vocabulary, size)
            tokens = self.room.count(prompt.text)
            if tokens <= self.length:
                return Row(prompt=prompt, tokens=tokens + self.room.new_tokens + self.room.wrapping)
            size -= step
        raise self.room.too_short()

    def _vocabulary(self) -> list[str]:
        """Coded words, the most frequent first. They are drawn anew for every row."""
        size = self.length // 50
        words: set[str] = set()
        drawn = 0
        while drawn < size or len(words) < size:
            words.add("".join(self.random.choices(string.ascii_lowercase, k=LETTERS)))
            drawn += 1
        return [NOISE, *shuffled(sorted(words))[1:]]


def _prompt(vocabulary: list[str], size: int) -> Prompt:
    import numpy as np
    from scipy.special import zeta

    ranks = np.arange(1, len(vocabulary) + 1)
    counts = (size * (ranks**-ALPHA) / zeta(ALPHA)).astype(int)
    words = [word for word, count in zip(vocabulary, counts) for _ in range(count)]
    return FAMILIES["fwe"].fill(" ".join(shuffled(words)), vocabulary[1:4])
