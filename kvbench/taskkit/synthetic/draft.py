"""Build a problem piece by piece: `ask` adds to the prompt, `write` to the solution (the right output).

A piece is the text of one token of the vocabulary; `vocabulary.ids` and a test check this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import ANSWER, FORM, Problem
from kvbench.taskkit.synthetic.vocabulary import OPENING, PLACES

FIRST = "#"  # the same first token in every prompt: models use the first token as attention sink


@dataclass(slots=True)
class Draft:
    """A problem under construction: the pieces of its prompt and of its solution so far."""

    prompt: list[str] = field(default_factory=lambda: [FIRST])
    solution: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # of each piece of the solution
    ends: list[int] = field(default_factory=list)  # number of solution pieces at the end of each step

    def ask(self, *pieces: str) -> None:
        self.prompt += pieces

    def write(self, kind: str, *pieces: str) -> None:
        self.solution += pieces
        self.kinds += [kind] * len(pieces)

    def end_step(self) -> None:
        self.ends.append(len(self.solution))

    def box(self, *pieces: str) -> None:
        self.write(FORM, " \\", "boxed", "{")
        self.write(ANSWER, *pieces)
        self.write(FORM, "}")

    def finish(self, answer: str) -> Problem:
        starts = [0, *self.ends[:-1]]
        return Problem(
            prompt="".join(self.prompt),
            solution="".join(self.solution),
            answer=answer,
            steps=tuple("".join(self.solution[start:end]) for start, end in zip(starts, self.ends, strict=True)),
            tail="".join(self.solution[self.ends[-1] :]),
            prompt_pieces=tuple(self.prompt),
            solution_pieces=tuple(self.solution),
            solution_kinds=tuple(self.kinds),
        )


def number(value: int) -> tuple[str, str]:
    """Return the tens and the units of a two-digit number as two pieces."""
    return f" {value // 10}", str(value % 10)


def plus(a: int, b: int) -> int:
    """Add two-digit numbers digit by digit, without carry."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def filler(draw: Draw) -> tuple[str, ...]:
    """Return a random filler sentence, about which no question asks, as seven pieces."""
    words = [*(draw.pick(choices) for choices in OPENING), "the", draw.pick(PLACES)]
    return *(f" {word}" for word in words), "."


def spread(facts: Iterable[tuple[str, ...]], n_filler: int, draw: Draw) -> list[str]:
    """Return the pieces of the facts, in their order, with `n_filler` filler sentences at random places among them."""
    rows = list(facts)
    gaps = [0] * (len(rows) + 1)
    for _ in range(n_filler):
        gaps[draw.below(len(gaps))] += 1
    pieces: list[str] = []
    for gap, row in zip(gaps, [*rows, ()], strict=True):
        for _ in range(gap):
            pieces += filler(draw)
        pieces += row
    return pieces
