"""RULER's variable tracking: a chain of assignments among noise sentences, after an example with another chain.

The example is drawn once. In each prompt, its variables get new names, also of three letters, and a new value.
"""

from __future__ import annotations

import string
from dataclasses import replace
from functools import partial
from itertools import pairwise

from kvbench.errors import UserError, quote
from kvbench.taskkit.ruler.fit_length import Prompts
from kvbench.taskkit.ruler.niah import NOISE
from kvbench.taskkit.ruler.recipes import FAMILIES, SEED, Filled, Row

HOPS = 4
EXAMPLE_LENGTH = 500  # tokens
EXAMPLE_VALUE = "12345"


class VariableTracking(Prompts):
    def __post_init__(self) -> None:
        import numpy as np

        super().__post_init__()
        self.numbers = np.random.RandomState(SEED)  # draws the variables' values only

    def rows(self, n: int) -> list[Row]:
        room = self.room
        example = self._example()
        step = 10 if room.asked >= 4096 else 5
        size = room.size(self.draw, step, extra=room.count(example))
        return [room.fit(lambda s: self._after(example, self.draw(s)), size, step) for _ in range(n)]

    def draw(self, size: int, *, example: bool = False) -> Filled:
        """Draw a prompt: a chain of assignments among `size` copies of the noise text. example: draw the example, which
        has shorter variable names and a fixed value. Raises ValueError if there are more assignments than copies."""
        names: list[str] = []
        while len(names) <= HOPS:
            name = self._name(3 if example else 5)
            if name not in names:  # the official generator fails on a duplicate, which is rare
                names.append(name)
        value = EXAMPLE_VALUE if example else self._value()
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {later} = VAR {earlier} " for earlier, later in pairwise(names)]
        lines = [NOISE] * size
        for i, place in enumerate(sorted(self.random.sample(range(size), len(chain)))):
            lines.insert(place + i, chain[i])
        context = "\n".join(lines).replace(". \n", ".\n")
        return FAMILIES["vt"].fill(context, names, query=value, count=HOPS + 1)

    def _example(self) -> str:
        room = replace(self.room, asked=EXAMPLE_LENGTH, new_tokens=0)
        draw = partial(self.draw, example=True)
        try:
            prompt = room.fit(draw, room.size(draw, 5), 5).prompt
        except UserError:
            raise UserError(
                f"task {quote(room.name)} needs an example of at most {EXAMPLE_LENGTH} tokens; "
                "with this tokenizer the shortest example is longer. Leave the task out, or use another model."
            ) from None
        return f"{prompt.text} {' '.join(prompt.outputs)}\n"

    def _after(self, example: str, prompt: Filled) -> Filled:
        """Return the prompt with the example in front of it; the example's variables get new names and a new value."""
        for name in example.split()[-HOPS - 1 :]:
            example = example.replace(name, self._name(len(name)))
        example = example.replace(EXAMPLE_VALUE, self._value())
        return replace(prompt, context=f"{example}\n{prompt.context}")

    def _name(self, letters: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=letters))

    def _value(self) -> str:
        return str(self.numbers.randint(10000, 99999))
