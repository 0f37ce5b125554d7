"""Prompts with a needle at a chosen depth of a haystack, for the task "needle in a haystack".

The haystack consists of consecutive sentences of a text. It starts at some sentence; after the text's last sentence it
goes on with the first. The needle goes to the sentence boundary nearest to the wanted depth. Depth is the share of the
haystack's characters that precede the needle, in per cent.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate

from kvbench.taskkit.ruler.fit_length import Room
from kvbench.taskkit.ruler.material import Sources
from kvbench.taskkit.ruler.needles import Needle
from kvbench.taskkit.ruler.niah import NOISE
from kvbench.taskkit.ruler.recipes import Filled, Row

DEPTHS = tuple(range(0, 101, 10))  # per cent
STEP = 10  # sentences


@dataclass(kw_only=True)
class Grid:
    """The prompts of one length, each with a needle at some depth of a haystack."""

    room: Room
    material: Sources
    essays: bool  # True: the haystack is essays; False: RULER's noise sentences
    needle: Callable[[str], Needle]  # one of the functions of the module `needles`

    def __post_init__(self) -> None:
        self._sizes = cache(self._size)

    def row(self, depth: int, number: int) -> Row:
        """Return the prompt that hides a needle at `depth` per cent of a haystack. number: the prompt's number at this
        depth, which also determines where in the text the haystack starts."""
        return self.room.fit(partial(self._prompt, depth, number), self._sizes(number), 1, needle=True)

    def _size(self, number: int) -> int:
        return self.room.size(partial(self._prompt, 0, number), STEP)

    def _prompt(self, depth: int, number: int, size: int) -> Filled:
        hay = self._hay(number, size)
        needle = self.needle(f"niah-{self.room.asked}-{depth}-{number}")
        apart = 100 / (len(needle.others) + 1)  # other sentences follow at equal distances, and wrap around at the end
        depths = [depth, *((depth + apart * n) % 100 for n in range(1, len(needle.others) + 1))]
        places = [boundary(hay, of_sentence) for of_sentence in depths]
        for place, sentence in sorted(zip(places, (needle.sentence, *needle.others), strict=True), reverse=True):
            hay.insert(place, sentence)
        return Filled(
            context=needle.before + " ".join(hay) + needle.end,
            question=needle.question,
            answer_prefix=needle.answer_prefix,
            outputs=needle.outputs,
            cluster=f"hay-{number}",
        )

    def _hay(self, number: int, size: int) -> list[str]:
        """Return `size` sentences. number: the haystack's number, which determines the sentence at which it starts."""
        text = self._sentences
        start = random.Random(f"niah-{number}").randrange(len(text)) if self.essays else number % len(text)
        turns = -(-(start + size) // len(text))
        return (text * turns)[start : start + size]

    @cached_property
    def _sentences(self) -> list[str]:
        if not self.essays:
            return [f"{sentence}." for sentence in NOISE.removesuffix(".").split(". ")]
        return self.material.sentences(" ".join(self.material.essays().split()))


def boundary(sentences: Sequence[str], depth: float) -> int:
    """Return how many sentences must precede the needle, so that its depth in the text is about `depth` per cent.

    The needle goes to the sentence boundary nearest to this depth. If two boundaries are equally near, it goes to the
    earlier one.
    """
    ends = [0, *accumulate(len(sentence) + 1 for sentence in sentences)]
    wanted = ends[-1] * depth / 100
    after = bisect_left(ends, wanted)
    return after if after == 0 or ends[after] - wanted < wanted - ends[after - 1] else after - 1
