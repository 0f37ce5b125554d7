"""`walk`: a short prompt with ten facts, then a long right output (the solution) whose every step needs a fact.

In the form `Digits` a step is a digit x[n+1] = (x[n-2] + v[x[n]]) mod 10, until the last three digits are 0 0 0. The
facts, v, never occur in the solution, so the prompt is their only source. The model reads each fact once per about ten
tokens, so attention shows what to keep.

In the form `Lines` a step is a line, which adds a fact to a register; the register's last digit says which fact. Each
line repeats its fact, so even methods that keep recent tokens score well, and no attention-based method gets far above
random eviction.

The answer is the number of steps or lines. The prompt does not state it: the model stops where the rule says, and the
scorer counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from kvbench.taskkit.synthetic.draft import Draft, number, plus, spread
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import ANSWER, FACT, FORM, PLAN, RESULT, STEP, Problem, Score, right_steps, said
from kvbench.taskkit.synthetic.vocabulary import NAMES, REGISTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Settings of a walk in which each step is one digit.

    The shipped model was trained on 8 to 500 steps and 0 to 8 filler sentences.
    """

    n_steps: int = 300
    n_filler: int = 0
    shuffle: bool = True  # list the facts in random order instead of sorted by key

    def __post_init__(self) -> None:
        if not 1 <= self.n_steps <= 900:  # a walk has 1,000 states; longer cycles are too rare to search for
            raise ValueError(f"n_steps must be 1 to 900, not {self.n_steps}")
        if self.n_filler < 0:
            raise ValueError(f"n_filler must be at least 0, not {self.n_filler}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Settings of a walk in which each step is a line with one addition.

    The shipped model was trained on 2 to 64 lines, up to 4 filler sentences and up to 4 distractors (facts that no line
    uses).
    """

    n_lines: int = 30
    n_filler: int = 0
    n_distract: int = 0  # number of facts without an index, which no line uses
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.n_lines <= 90:  # a register has 100 values
            raise ValueError(f"n_lines must be 1 to 90, not {self.n_lines}")
        if self.n_filler < 0 or not 0 <= self.n_distract <= len(NAMES) - 10:
            raise ValueError(f"n_filler must be at least 0 and n_distract must be 0 to {len(NAMES) - 10}, not {self}")


Knobs = Digits | Lines


def generate(seed: int, knobs: Knobs = Digits()) -> Problem:
    return _digits(seed, knobs) if isinstance(knobs, Digits) else _lines(seed, knobs)


def _digits(seed: int, knobs: Digits) -> Problem:
    draw = Draw("walk-digits", seed)
    values, walk = _cycle_through_000(knobs.n_steps, draw)
    keys = draw.shuffled(range(10)) if knobs.shuffle else list(range(10))
    facts = [(f" {key}", str(values[key]), ",") for key in keys]
    draft = Draft()
    draft.ask(" Facts", ":", *spread(facts, knobs.n_filler, draw), "\n")
    draft.ask("Ask", ":", " 0", " 0", " 0", "?", "\n", "Think", ":", *(f" {digit}" for digit in walk[:3]))
    for digit in walk[3:]:
        draft.write(STEP, f" {digit}")
        draft.end_step()
    draft.write(ANSWER, " Answer")
    draft.box(*number(0))
    return draft.finish(str(knobs.n_steps))


def _cycle_through_000(n_steps: int, draw: Draw) -> tuple[list[int], list[int]]:
    """Draw the facts v and the digits x of a walk that reaches 0 0 0 only at its end.

    The walk has three first digits, then `n_steps` digits. Its state is its last three digits. For every v, a step
    (x[n-2], x[n-1], x[n]) -> (x[n-1], x[n], x[n+1]) permutes the 1,000 states. Every state therefore has exactly one
    state before it, and the walk is computed backwards from 0 0 0. If 0 0 0 comes again too early, new facts are drawn.
    So no state occurs twice in a walk, and the model cannot copy an earlier part.
    """
    while True:
        values = [draw.below(10) for _ in range(10)]
        back = [0, 0, 0]  # newest first
        for n in range(n_steps + 3):
            # x[n-2] = x[n+1] - v[x[n]]: `back` ends in ..., x[n+1], x[n], x[n-1]
            back.append((back[-3] - values[back[-2]]) % 10)
            if n < n_steps + 2 and back[-1] == back[-2] == back[-3] == 0:
                break
        else:
            return values, back[n_steps + 2 :: -1]


def _lines(seed: int, knobs: Lines) -> Problem:
    draw = Draw("walk-lines", seed)
    values, walk = _cycle_through_00(knobs.n_lines, draw)
    names = draw.sample(NAMES, 10 + knobs.n_distract)
    facts: list[tuple[str, ...]] = [(f" {i}", f" {names[i]}", *number(value), ",") for i, value in enumerate(values)]
    facts += [(f" {name}", *number(draw.below(100)), ",") for name in names[10:]]
    if knobs.shuffle:
        facts = draw.shuffled(facts)
    register = f" {REGISTER}"
    draft = Draft()
    draft.ask(" Facts", ":", *spread(facts, knobs.n_filler, draw), "\n")
    draft.ask("Ask", ":", register, *number(0), "?", "\n", "Think", ":", register, *number(walk[0]), "\n")
    for state, after in pairwise(walk):
        index = state % 10
        draft.write(PLAN, f" {index}")
        draft.write(FACT, f" {names[index]}")
        draft.write(FORM, ";", register)
        draft.write(PLAN, *number(_swapped(state)))
        draft.write(FORM, " +")
        draft.write(PLAN, f" {names[index]}")
        draft.write(FACT, *number(values[index]))
        draft.write(FORM, " =", register)
        draft.write(RESULT, *number(after))
        draft.write(FORM, "\n")
        draft.end_step()
    draft.write(ANSWER, " Answer")
    draft.box(*number(0))
    return draft.finish(str(knobs.n_lines))


def _swapped(value: int) -> int:
    return value % 10 * 10 + value // 10


def _cycle_through_00(n_lines: int, draw: Draw) -> tuple[list[int], list[int]]:
    """Draw the facts v of a walk in the form `Lines`, and the `n_lines + 1` values of its register.

    Only the last of these values is 00.

    A line with the register's last digit u swaps the register's two digits, and then adds the fact v[u]. Without the
    swap, the last digit of each value would depend only on the last digit of the value before, and the walk would
    soon need only about three of the ten facts, again and again.
    The facts are drawn such that u -> (u + tens(v[u])) mod 10 permutes the ten digits. With the swap, a line therefore
    permutes the register's 100 values.
    """
    while True:
        values = [(target - u) % 10 * 10 + draw.below(10) for u, target in enumerate(draw.shuffled(range(10)))]
        cycle = [0]
        while (after := plus(_swapped(cycle[-1]), values[cycle[-1] % 10])) != 0:
            cycle.append(after)
        if len(cycle) > n_lines:
            return values, [*cycle[len(cycle) - n_lines :], 0]


def score(problem: Problem, output: str) -> Score:
    """Return the scores of an output.

    exact: 1 if the output has as many steps as the solution and then ends with the same text; the steps themselves are
    not compared. So a walk with wrong steps may score 1 by chance, with a probability of 0.01 to 0.05. partial: the
    share of steps before the first error.
    """
    text = said(output)
    head, stopped, rest = text.partition(" Answer")
    count = head.count("\n") if "\n" in problem.steps[0] else len(re.findall(r" [0-9]", head))
    exact = stopped and stopped + rest == problem.tail and count == len(problem.steps)
    return Score(float(bool(exact)), right_steps(problem, text) / len(problem.steps), str(count) if stopped else None)
