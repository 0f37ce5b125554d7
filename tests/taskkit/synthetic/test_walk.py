"""The walks: the maps are permutations, the stop is reached once, scorers count the right thing."""

from __future__ import annotations

import pytest

from kvbench.taskkit.synthetic import walk
from kvbench.taskkit.synthetic.problem import HELD_OUT


def facts_of_digits(prompt: str) -> dict[int, int]:
    row = prompt.split("Facts:")[1].split("\n")[0]
    return {int(item[-2]): int(item[-1]) for item in row.split(",")[:-1]}


@pytest.mark.parametrize("seed", range(HELD_OUT, HELD_OUT + 20))
def test_digits_map_is_a_permutation_and_the_solution_follows_it(seed):
    problem = walk.generate(seed, walk.Digits(n_steps=200))
    value = facts_of_digits(problem.prompt)
    assert sorted(value) == list(range(10))
    after = {(a, b, c): (b, c, (a + value[c]) % 10) for a in range(10) for b in range(10) for c in range(10)}
    assert len(set(after.values())) == 1000

    state = tuple(int(d) for d in problem.prompt.split()[-3:])
    visited = {state}
    for step in problem.steps:
        state = after[state]
        assert step == f" {state[2]}"
        visited.add(state)
    assert state == (0, 0, 0)
    assert len(visited) == 201, "no state may come twice"


@pytest.mark.parametrize("seed", range(HELD_OUT, HELD_OUT + 20))
def test_lines_map_is_a_permutation_and_the_solution_follows_it(seed):
    problem = walk.generate(seed, walk.Lines(n_lines=20, n_distract=2, n_filler=2))
    indexed = [item.split() for item in problem.prompt.split("Facts:")[1].split("\n")[0].replace(".", ",").split(",")]
    value = {int(words[0]): (words[1], words[2]) for words in indexed if len(words) == 3 and words[0].isdigit()}
    assert sorted(value) == list(range(10))

    def follow(state: str) -> str:
        number = value[int(state[1])][1]
        return f"{(int(state[1]) + int(number[0])) % 10}{(int(state[0]) + int(number[1])) % 10}"

    assert len({follow(f"{n:02d}") for n in range(100)}) == 100
    state = problem.prompt.split()[-1]
    for line in problem.steps:
        name, number = value[int(state[1])]
        assert line == f" {state[1]} {name}; asp {state[::-1]} + {name} {number} = asp {follow(state)}\n"
        state = follow(state)
        assert (state == "00") == (line is problem.steps[-1])


def test_shuffle_off_sorts_the_facts():
    plain = walk.generate(1, walk.Digits(n_steps=5, shuffle=False))
    assert [item[-2] for item in plain.prompt.split("Facts:")[1].split("\n")[0].split(",")[:-1]] == list("0123456789")


@pytest.mark.parametrize("knobs", [walk.Digits(n_steps=50), walk.Lines(n_lines=12)])
def test_score(knobs):
    problem = walk.generate(HELD_OUT, knobs)
    n = len(problem.steps)
    assert walk.score(problem, problem.solution) == (1.0, 1.0, str(n))
    assert walk.score(problem, problem.solution + "<|end|><|pad|>") == (1.0, 1.0, str(n))
    assert walk.score(problem, "".join(problem.steps[: n // 2])) == (0.0, 0.5, None), "cut off: no answer"
    early = "".join(problem.steps[:-1]) + problem.tail
    assert walk.score(problem, early) == (0.0, (n - 1) / n, str(n - 1))
    late = "".join(problem.steps) + problem.steps[-1] + problem.tail
    assert walk.score(problem, late) == (0.0, 1.0, str(n + 1))
    assert walk.score(problem, "") == (0.0, 0.0, None)


def test_a_wrong_walk_that_stops_in_time_is_exact_by_chance_but_not_partial():
    problem = walk.generate(HELD_OUT, walk.Digits(n_steps=50))
    wrong = " 0" if problem.steps[10] != " 0" else " 1"
    text = "".join((*problem.steps[:10], wrong, *problem.steps[11:])) + problem.tail
    assert walk.score(problem, text) == (1.0, 0.2, "50")


def test_a_wrong_tail_is_not_exact():
    problem = walk.generate(HELD_OUT, walk.Digits(n_steps=50))
    assert walk.score(problem, problem.solution.replace("00}", "01}")).exact == 0.0


@pytest.mark.parametrize(
    ("knobs", "bad"),
    [
        (walk.Digits, {"n_steps": 0}),
        (walk.Digits, {"n_steps": 901}),
        (walk.Digits, {"n_filler": -1}),
        (walk.Lines, {"n_lines": 91}),
        (walk.Lines, {"n_distract": 55}),
    ],
)
def test_knobs_are_checked(knobs, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        knobs(**bad)
