"""RULER's frequent words extraction: find the three most frequent of many coded words.

Frequencies follow a zeta distribution. The most frequent word of all does not count: it is noise, and the prompt says
to ignore it.

In the official script, an imported package (rich) draws one random number after the seed is set. To make the same
prompts, this module also draws one number and drops it.
"""

from __future__ import annotations

import string
from functools import partial

from kvbench.taskkit.ruler.fit_length import Prompts, shuffled
from kvbench.taskkit.ruler.recipes import FAMILIES, Filled, Row

ALPHA = 2.0
LETTERS = 6
NOISE = "..."


class FrequentWords(Prompts):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.random.getrandbits(20)  # the number that rich draws, see above
        self.length = self.room.length - self.room.new_tokens

    def rows(self, n: int) -> list[Row]:
        step = self.length // 32
        if self.length // 50 < 4:  # the vocabulary must hold the noise word and three answers
            raise self.room.too_short()
        vocabulary, size = self._vocabulary(), self.length // LETTERS
        while self.room.count(_prompt(vocabulary, size).text) < self.length:
            size += step
        size -= step
        return [self.room.fit(partial(_prompt, self._vocabulary()), size, step) for _ in range(n)]

    def _vocabulary(self) -> list[str]:
        """Draw the words of a prompt, the most frequent first: the noise word, then the coded words."""
        size = self.length // 50
        words: set[str] = set()
        drawn = 0
        while drawn < size or len(words) < size:
            words.add("".join(self.random.choices(string.ascii_lowercase, k=LETTERS)))
            drawn += 1
        return [NOISE, *shuffled(sorted(words))[1:]]


def _prompt(vocabulary: list[str], size: int) -> Filled:
    import numpy as np
    from scipy.special import zeta

    ranks = np.arange(1, len(vocabulary) + 1)
    counts = (size * (ranks**-ALPHA) / zeta(ALPHA)).astype(int)
    words = [word for word, count in zip(vocabulary, counts) for _ in range(count)]
    return FAMILIES["fwe"].fill(" ".join(shuffled(words)), vocabulary[1:4])
