"""Base class of the three tasks for the built-in model: generated problems, no chat template, greedy decoding.

A variant (``orbit-300``) names settings of the problem generator. Problem i has the seed 10^9 + i: recipes train on
smaller seeds only (`kvbench.taskkit.synthetic.problem`). `kvbench.taskkit.synthetic.variants` lists the variants with
their budgets and purposes.
"""

from __future__ import annotations

from kvbench.task import DataSource, Doc, GenSpec, Output, Score, Task, Turn
from kvbench.taskkit.synthetic import variants
from kvbench.taskkit.synthetic.problem import HELD_OUT

PROBLEMS = 128  # number of problems without --limit; a higher limit generates more
SLACK = 16  # tokens generated beyond the length of the right solution, so that a missed stop shows


def variant_names(task: str) -> tuple[str, ...]:
    """Return the names of a task's variants; the first is the default."""
    return tuple(variant.name for variant in variants.VARIANTS.values() if variant.task == task)


class SyntheticTask(Task):
    """The base class of tasks with generated problems.

    `score` is 1 for a right answer, by the rule of each task. `score_partial` is the share of steps before the first
    error (`lookup`: of right keys).
    """

    suite = "synthetic"
    headline = "score_partial"
    cheap_score = True
    endless = True

    @property
    def definition(self) -> variants.Variant:
        return variants.VARIANTS[self.variant]

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        return [self._doc(HELD_OUT + i) for i in range(PROBLEMS if limit is None else limit)]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=len(self.definition.generate(HELD_OUT).solution_pieces) + SLACK, chat=False)

    def score(self, doc: Doc, output: Output) -> Score:
        exact, partial, answer = self.definition.score(self.definition.generate(doc.meta["seed"]), output.text)
        return Score(value=exact, partial=partial, extracted=answer, aux={"no_answer": float(answer is None)})

    def size(self) -> int:
        return PROBLEMS

    def floor(self, budget: int, interval: int) -> float:
        return variants.floor(self.definition.knobs, budget, interval)

    def _doc(self, seed: int) -> Doc:
        problem = self.definition.generate(seed)
        facts, line_end, rest = problem.prompt.partition("\n")  # the facts, then the question
        turn = Turn(context=facts + line_end, question=rest)
        meta = {"category": self.variant, "seed": seed}
        return Doc(doc_id=f"{self.variant}-{seed}", turns=(turn,), reference=problem.answer, meta=meta)
