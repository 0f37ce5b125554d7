"""Chains: every line of the solution is right, and the scorer stops at the first that is not."""

from __future__ import annotations

import re

import pytest

from kvbench.taskkit.synthetic import chain
from kvbench.taskkit.synthetic.problem import HELD_OUT


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("seed", range(HELD_OUT, HELD_OUT + 20))
def test_the_solution_follows_plan_and_facts(seed, carry):
    knobs = chain.Knobs(n_facts=6, n_steps=8, n_distract=6, n_filler=10, s0=3, carry=carry)
    problem = chain.generate(seed, knobs)
    facts, plan = problem.prompt.split("\n")[:2]
    value = dict(re.findall(r" ([a-z]{3}) ([0-9]{2}),", facts))
    assert len(value) == 12
    lines = re.findall(r" (S\d+) (\w+) \+ (\w+) = (\w+)\.", plan)
    assert len(lines) == 8
    for (label, a, b, c), step in zip(lines, problem.steps, strict=True):
        if carry:
            total = f"{(int(value[a]) + int(value[b])) % 100:02d}"
        else:
            total = "".join(str((int(x) + int(y)) % 10) for x, y in zip(value[a], value[b], strict=True))
        assert step == f" {label} {a} + {b} = {c}; {a} {value[a]} + {b} {value[b]} = {c} {total}."
        assert a != b
        value[c] = total
    assert problem.answer == value[lines[-1][3]]
    assert plan.endswith(" S11 Answer.")
    assert problem.tail == rf" S11 Answer \boxed{{ {problem.answer}}}"


def test_score():
    problem = chain.generate(HELD_OUT, chain.Knobs())
    assert chain.score(problem, problem.solution) == (1.0, 1.0, problem.answer)
    assert chain.score(problem, "".join(problem.steps[:3])) == (0.0, 0.75, None)
    wrong = problem.steps[0].replace("+", "-", 1)
    assert chain.score(problem, wrong + "".join(problem.steps[1:]) + problem.tail) == (1.0, 0.0, problem.answer)
    other = f"{(int(problem.answer) + 1) % 100:02d}"
    assert chain.score(problem, "".join(problem.steps) + rf" S5 Answer \boxed{{ {other}}}") == (0.0, 1.0, other)
    assert chain.score(problem, r"\boxed{ 12") == (0.0, 0.0, None), "an open box is no answer"


@pytest.mark.parametrize(
    "bad", [{"n_facts": 1}, {"n_steps": 0}, {"n_filler": -1}, {"n_steps": 60}, {"s0": 0}, {"s0": 96}]
)
def test_knobs_are_checked(bad):
    with pytest.raises(ValueError, match=r"chain needs|at most|s0 must be"):
        chain.Knobs(**bad)
