"""RULER's needle subtasks: sentences "One of the special magic numbers for KEY is: VALUE." among other text.

The other text (the haystack) is the noise sentences, Paul Graham's essays split into sentences, or more needles of the
same form.
"""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from kvbench.taskkit.ruler.fit_length import Prompts, shuffled
from kvbench.taskkit.ruler.recipes import FAMILIES, Filled, Row

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [round(i * 100 / 39) for i in range(40)]  # for essays: per cent of sentences before a needle


@dataclass(kw_only=True)
class Needles(Prompts):
    """The prompts of a needle subtask.

    keys, values: the kind (words, numbers or uuids) of the needles' keys and values. keys_hidden: number of keys in the
    text. values_per_key: number of needles with the same key. keys_asked: number of keys in the question.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    keys_hidden: int = 1
    values_per_key: int = 1
    keys_asked: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sentences = lru_cache(maxsize=4)(self._sentences)

    def rows(self, n: int) -> list[Row]:
        room = self.room
        step = 500 if self.haystack == "essay" else 25 if room.asked >= 4096 else 5
        size = room.size(self.draw, step)
        return [room.fit(self.draw, size, step, needle=True) for _ in range(n)]

    def draw(self, size: int) -> Filled:
        """Draw a prompt whose haystack has `size` units: words of essays, copies of the noise text, or more needles."""
        hidden = []
        for _ in range(self.keys_hidden):
            key = self._draw(self.keys)
            hidden.append((key, [self._draw(self.values) for _ in range(self.values_per_key)]))
        needles = shuffled([self._needle(key, value) for key, values in hidden for value in values])
        context = self._in_essays(size, needles) if self.haystack == "essay" else self._in_lines(size, needles)
        asked = [hidden[i] for i in self.random.sample(range(self.keys_hidden), self.keys_asked)]
        keys = [key for key, _ in asked]
        single = self.keys_asked * self.values_per_key == 1
        return FAMILIES["niah"].fill(
            context,
            [value for _, values in asked for value in values],
            singular=single,
            kind=self.values[:-1] if single else self.values,
            query=f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0],
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.values, key=key, value=value)

    def _draw(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=self.random.getrandbits(128), version=4))
        return self.random.choice(self._words)

    def _in_lines(self, size: int, needles: list[str]) -> str:
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(self._draw(self.keys), self._draw(self.values)) for _ in range(size)]
        for place, needle in zip(sorted(self.random.sample(range(size), len(needles)), reverse=True), needles):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _in_essays(self, size: int, needles: list[str]) -> str:
        sentences = self.sentences(size)
        depths = self.random.sample(DEPTHS, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts = []
        for start, end, needle in zip([0, *places], places, needles):
            parts += [" ".join(sentences[start:end]), needle]
        return " ".join([*parts, " ".join(sentences[places[-1] :])])

    def _sentences(self, size: int) -> list[str]:
        """Return the first `size` words of the essays, split into sentences; essays repeat if they are too short."""
        words = self._essay_words
        return self.material.sentences(" ".join((words * -(-size // len(words)))[:size]).strip())

    @cached_property
    def _essay_words(self) -> list[str]:
        return re.sub(r"\s+", " ", self.material.essays()).split(" ")

    @cached_property
    def _words(self) -> _Pairs:
        return _Pairs(self.material.words("adjectivelist"), self.material.words("nounlist"))


class _Pairs:
    """All six million strings "adjective-noun" in sorted order; most strings are built only when they are indexed."""

    def __init__(self, adjectives: list[str], nouns: list[str]) -> None:
        self.nouns = sorted(set(nouns))
        # Strings sort by adjective, except where an adjective begins with another one and a hyphen (blue, blue-eyed).
        groups: list[list[str]] = []
        for adjective in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and adjective.startswith(groups[-1][0]):
                groups[-1].append(adjective)
            else:
                groups.append([adjective])
        self.groups = [
            sorted({adjective + noun for adjective in group for noun in self.nouns}) if len(group) > 1 else group[0]
            for group in groups
        ]
        sizes = (len(self.nouns) if isinstance(group, str) else len(group) for group in self.groups)
        self.ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> str:
        place = range(len(self))[index]
        number = bisect_right(self.ends, place)
        group = self.groups[number]
        within = place - (self.ends[number - 1] if number else 0)
        return group + self.nouns[within] if isinstance(group, str) else group[within]
