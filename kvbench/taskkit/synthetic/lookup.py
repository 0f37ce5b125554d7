"""`lookup`: the prompt lists facts (keys with values) and asks for some keys; the solution lists their values.

This tests retrieval from the prompt: the attention from the question's tokens shows which cache entries are needed.
With a large `n_ask` (number of keys that the question names) the budget must hold many facts at once. For long
generation see `walk`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbench.taskkit.synthetic.draft import Draft, number, spread
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import FACT, FORM, PLAN, Problem, Score, said
from kvbench.taskkit.synthetic.vocabulary import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    n_facts: int = 16
    n_ask: int = 8
    n_filler: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.n_ask <= self.n_facts <= len(NAMES):
            raise ValueError(f"lookup needs 1 <= n_ask <= n_facts <= {len(NAMES)}, not {self}")
        if self.n_filler < 0:
            raise ValueError(f"n_filler must be at least 0, not {self.n_filler}")


def generate(seed: int, knobs: Knobs = Knobs()) -> Problem:
    draw = Draw("lookup", seed)
    facts = {name: draw.below(100) for name in draw.sample(NAMES, knobs.n_facts)}
    asked = draw.sample(list(facts), knobs.n_ask)
    draft = Draft()
    rows = [(f" {name}", *number(value), ",") for name, value in facts.items()]
    draft.ask(" Facts", ":", *spread(rows, knobs.n_filler, draw), "\n")
    draft.ask("Ask", ":", *(f" {name}" for name in asked), "?", "\n", "Think", ":")
    for name in asked:
        draft.write(PLAN, f" {name}")
        draft.write(FACT, *number(facts[name]))
        draft.write(FORM, ",")
        draft.end_step()
    return draft.finish(_listed([(name, f"{facts[name]:02d}") for name in asked]))


def score(problem: Problem, output: str) -> Score:
    """Return the scores of an output.

    exact: 1 if the output equals the solution. partial: the share of the asked keys for which the output states the
    right value. If the output states several values for a key, the first of them counts.
    """
    text = said(output)
    given: dict[str, str] = {}
    for name, value in re.findall(r" ([a-z]+) ([0-9]{2}),", text):
        given.setdefault(name, value)
    right = sum(given.get(step[1:-4]) == step[-3:-1] for step in problem.steps)
    answer = _listed(list(given.items())) if given else None
    return Score(float(text == problem.solution), right / len(problem.steps), answer)


def _listed(pairs: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)
