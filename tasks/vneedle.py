"""`vneedle`: pictures of grids of numbers, and several turns. Each turn asks for the number at one place of one grid.

In the grid variants the model reads all pictures in the first turn. In spread-4 every turn is a new prompt with all
pictures so far. The text does not hold the numbers, so every answer needs the entries of one picture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbench.registry import tasks
from kvbench.scoring.boxed import after_thinking
from kvbench.task import IMAGE, DataSource, Doc, GenSpec, Image, Output, Score, Task, Turn
from kvbench.taskkit.grid_image import grid_png
from kvbench.taskkit.synthetic.draw import Draw

QUESTIONS = 128  # number of questions without --limit; a higher limit generates more
NEW_TOKENS = 16  # per turn
NUMBERS = range(10, 100)  # two digits, so that a row or column, of one digit, is never read as the number
_NUMBER = re.compile(r"(?<![0-9])[0-9]{2}(?![0-9])")


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of a variant. images: number of pictures in all turns together. side: number of rows, and of
    columns, of a grid. turns: number of turns, each with one question. spread: True: every turn brings one picture;
    False: the first turn brings all."""

    images: int
    side: int
    turns: int
    spread: bool = False


VARIANTS = {
    "grid-4": Knobs(images=4, side=4, turns=4),
    "grid-3": Knobs(images=2, side=3, turns=2),
    "grid-6": Knobs(images=6, side=6, turns=6),
    "spread-4": Knobs(images=4, side=4, turns=4, spread=True),
}


@tasks.register("vneedle")
class VisualNeedle(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "vision"
    summary = "numbers on grids in several pictures, asked for over several turns (needs a model that reads images)"
    variants = tuple(VARIANTS)
    headline = "score_partial"
    cheap_score = True
    endless = True

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        return [self._doc(number) for number in range(QUESTIONS if limit is None else limit)]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=NEW_TOKENS, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        """Score each answer by the last two-digit number in it.

        The score is 1 if all answers are right, else 0; the partial score is the share of right answers. The strict
        score is 1 if every answer is the right number and nothing else. If an answer is missing, there is no score.
        """
        answers = [after_thinking(text, output.thinking).strip() for text in output.turns]
        if len(answers) < len(doc.turns):
            return Score(value=None, note=f"the model gave {len(answers)} of {len(doc.turns)} answers")
        said = [found[-1] if (found := _NUMBER.findall(text)) else None for text in answers]
        right = [float(number == wanted) for number, wanted in zip(said, doc.reference)]
        return Score(
            value=float(all(right)),
            strict=float(tuple(answers) == doc.reference),
            partial=sum(right) / len(right),
            extracted=", ".join(number or "-" for number in said),
            aux={"no_answer": said.count(None) / len(said), **{f"right_{n}": r for n, r in enumerate(right, 1)}},
        )

    def size(self) -> int:
        return QUESTIONS

    def _doc(self, seed: int) -> Doc:
        knobs, draw = VARIANTS[self.variant], Draw("vneedle", self.variant, seed)
        grids = [_grid(knobs.side, draw) for _ in range(knobs.images)]
        images = [Image(name=f"grid-{n}.png", data=grid_png(grid)) for n, grid in enumerate(grids, 1)]
        turns, numbers = [], []
        about = draw.shuffled(range(knobs.images))
        for turn in range(knobs.turns):
            shown = range(turn, turn + 1) if knobs.spread else range(0 if turn else knobs.images)
            at = draw.below(turn + 1) if knobs.spread else about[turn]
            row, column = draw.below(knobs.side), draw.below(knobs.side)
            turns.append(
                Turn(
                    context="".join(f"Image {n + 1}: {IMAGE}\n" for n in shown),
                    question=f"In image {at + 1}, which number stands in row {row + 1}, column {column + 1}? "
                    "Reply with the number alone.",
                    images=tuple(images[n] for n in shown),
                )
            )
            numbers.append(str(grids[at][row][column]))
        return Doc(
            doc_id=f"{self.variant}-{seed}",
            turns=tuple(turns),
            reference=tuple(numbers),
            meta={"category": self.variant, "seed": seed},
        )


def _grid(side: int, draw: Draw) -> list[list[int]]:
    """Return `side` rows of `side` random two-digit numbers; no number occurs twice."""
    numbers = draw.sample(NUMBERS, side * side)
    return [numbers[start : start + side] for start in range(0, side * side, side)]
