"""Base class of the three tasks for the built-in model: generated problems, no chat template, greedy decoding.

A variant (``orbit-300``) names a setting of the generator. Problem i has the seed 10^9 + i, which training never draws.
`kvbench.taskkit.synthetic.cells` lists the variants with their budgets and purposes.
"""

from __future__ import annotations

from kvbench.task import DataSource, Doc, GenSpec, Output, Score, Task, Turn
from kvbench.taskkit.synthetic import cells
from kvbench.taskkit.synthetic.problem import HELD_OUT

PROBLEMS = 128  # without --limit; more are generated on demand
SLACK = 16  # tokens of the built-in model beyond the right trace, so that a missed stop shows


def cell_names(task: str) -> tuple[str, ...]:
    """Return the names of a task's settings, which are its variants; the first is the default."""
    return tuple(cell.name for cell in cells.CELLS.values() if cell.task == task)


class SyntheticTask(Task):
    """Problems of one setting. `score`: exact match; `score_partial`: the share of right steps or keys."""

    suite = "synthetic"
    headline = "score_partial"
    cheap_score = True

    @property
    def cell(self) -> cells.Cell:
        return cells.CELLS[self.variant]

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        return [self._doc(HELD_OUT + i) for i in range(PROBLEMS if limit is None else limit)]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=len(self.cell.generate(HELD_OUT).trace_pieces) + SLACK, chat=False)

    def score(self, doc: Doc, output: Output) -> Score:
        exact, partial, answer = self.cell.score(self.cell.generate(doc.meta["seed"]), output.text)
        return Score(value=exact, partial=partial, extracted=answer, aux={"no_answer": float(answer is None)})

    def size(self) -> None:
        """Return None: the number is unbounded; --limit sets it, `PROBLEMS` is the default."""

    def floor(self, budget: int, interval: int) -> float:
        return cells.floor(self.cell.knobs, budget, interval)

    def _doc(self, seed: int) -> Doc:
        problem = self.cell.generate(seed)
        facts, line_end, rest = problem.prompt.partition("\n")  # the facts, then the question
        turn = Turn(context=facts + line_end, question=rest)
        meta = {"category": self.variant, "seed": seed}
        return Doc(doc_id=f"{self.variant}-{seed}", turns=(turn,), reference=problem.answer, meta=meta)
