"""RULER's common words extraction: after a solved example, find the ten most frequent words of a numbered list."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from kvbench.taskkit.ruler.fit_length import Prompts, largest, shuffled
from kvbench.taskkit.ruler.recipes import FAMILIES, Filled, Row

COMMON = 10
STEP = 10
SAMPLE = 4096  # size of the prompt that is drawn only to measure the tokens per word


class CommonWords(Prompts):
    def __post_init__(self) -> None:
        super().__post_init__()
        long = self.room.asked >= 4096
        self.repeats = (30, 3) if long else (6, 1)  # occurrences of each common word, and of each other word
        self.example = (40, (10, 3)) if long else (20, (3, 1))  # number of words, and their `repeats`

    def rows(self, n: int) -> list[Row]:
        room = self.room
        per_word = room.count(self.draw(SAMPLE).text) / SAMPLE
        high = max(int(room.length // per_word) * 2, 2 * STEP)
        size = largest(lambda s: room.tokens(self.draw(s)) <= room.length, STEP, high) or STEP
        return [room.fit(self.draw, size, STEP) for _ in range(n)]

    def draw(self, size: int) -> Filled:
        """Draw a prompt whose numbered list has `size` different words."""
        family = FAMILIES["cwe"]
        words, repeats = self.example
        example = family.fill(*self._list(words, repeats))
        prompt = family.fill(*self._list(size, self.repeats))
        return replace(prompt, context=f"{example.text} {_numbered(example.outputs)}\n{prompt.context}")

    def _list(self, size: int, repeats: tuple[int, int]) -> tuple[str, list[str]]:
        """Draw a numbered list of `size` different words; return the list and its ten most common words. repeats: how
        often each of the ten occurs, and how often each other word."""
        pool = self._words if size <= len(self._words) else self._more_words
        drawn = self.random.sample(pool, size)
        common, others = drawn[:COMMON], drawn[COMMON:]
        return _numbered(shuffled(common * repeats[0] + others * repeats[1])), common

    @cached_property
    def _words(self) -> list[str]:
        lists = (self.material.words(name) for name in ("nounlist", "adjectivelist", "verblist"))
        return shuffled(sorted({word for words in lists for word in words}))

    @cached_property
    def _more_words(self) -> list[str]:
        return self.material.english_words()


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join([f"{number}. {word}" for number, word in enumerate(words, start=1)])
