"""Lookups: the solution lists the asked facts, and each key scores by itself."""

from __future__ import annotations

import re

import pytest

from kvbench.taskkit.synthetic import lookup
from kvbench.taskkit.synthetic.problem import HELD_OUT


@pytest.mark.parametrize("seed", range(HELD_OUT, HELD_OUT + 20))
def test_the_solution_lists_the_asked_facts(seed):
    problem = lookup.generate(seed)
    facts, question = problem.prompt.split("\n")[:2]
    value = dict(re.findall(r" ([a-z]{3}) ([0-9]{2}),", facts))
    assert len(value) == 16
    asked = question.removeprefix("Ask: ").removesuffix("?").split()
    assert len(set(asked)) == 8
    assert problem.solution == "".join(f" {name} {value[name]}," for name in asked)


def test_score():
    problem = lookup.generate(HELD_OUT)
    steps = problem.steps
    assert lookup.score(problem, problem.solution) == (1.0, 1.0, problem.answer)
    assert lookup.score(problem, "".join(steps[:4])).partial == 0.5
    assert lookup.score(problem, "".join(steps[4:])).partial == 0.5, "each key counts by itself"
    assert lookup.score(problem, "".join(reversed(steps)))[:2] == (0.0, 1.0)
    name = steps[0][1:-4]
    assert lookup.score(problem, f" {name} xx,{problem.solution}").partial == 1.0
    wrong = f" {name} {(int(steps[0][-3:-1]) + 1) % 100:02d},"
    assert lookup.score(problem, wrong + problem.solution).partial == 7 / 8, "the first value given counts"
    assert lookup.score(problem, "") == (0.0, 0.0, None)


@pytest.mark.parametrize("bad", [{"n_ask": 0}, {"n_ask": 17}, {"n_facts": 66}, {"n_filler": -1}])
def test_knobs_are_checked(bad):
    with pytest.raises(ValueError, match=r"lookup needs|must be at least 0"):
        lookup.Knobs(**bad)
