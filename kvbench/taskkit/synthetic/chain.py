"""`chain`: the prompt lists a plan of additions. To write the solution (the right output), a model must read each plan
line exactly once.

This tests foresight: past attention does not show which plan line comes next, and may point at lines already done. The
task suits methods that predict future attention; a comparison on this task alone is unfair to methods that use past
attention.

Sums are digit by digit without carry; with `carry=True` they are modulo 100 (the shipped model was not trained on
this). The last plan line is the word "Answer", so the model reads from the plan where to stop and need not count steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.taskkit.synthetic.draft import Draft, number, plus, spread
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import ANSWER, FACT, FORM, PLAN, RESULT, Problem, Score, boxed, right_steps, said
from kvbench.taskkit.synthetic.vocabulary import LABELS, NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    n_facts: int = 4
    n_steps: int = 4
    n_distract: int = 6  # facts that no step uses
    n_filler: int = 8
    p_prev: float = 0.6  # probability that the first operand is the previous result
    p_old: float = 0.5  # probability that the second operand is an older result
    s0: int = 1  # label of the first step
    carry: bool = False

    def __post_init__(self) -> None:
        if self.n_facts < 2 or self.n_steps < 1 or min(self.n_distract, self.n_filler) < 0:
            raise ValueError(f"chain needs n_facts >= 2, n_steps >= 1, and n_distract and n_filler >= 0, not {self}")
        if self.n_facts + self.n_distract + self.n_steps > len(NAMES):
            raise ValueError(f"n_facts + n_distract + n_steps must be at most {len(NAMES)}, the number of names")
        if not 1 <= self.s0 <= len(LABELS) - self.n_steps:
            raise ValueError(f"s0 must be 1 to {len(LABELS) - self.n_steps} with n_steps={self.n_steps}, not {self.s0}")


def generate(seed: int, knobs: Knobs = Knobs()) -> Problem:
    draw = Draw("chain", seed)
    n_known = knobs.n_facts + knobs.n_distract
    names = draw.sample(NAMES, n_known + knobs.n_steps)
    facts, results = names[: knobs.n_facts], names[n_known:]
    value = {name: draw.below(100) for name in names[:n_known]}
    labels = LABELS[knobs.s0 - 1 :]

    plan: list[tuple[str, str, str]] = []
    for done, result in enumerate(results):
        first = results[done - 1] if done and draw.chance(knobs.p_prev) else draw.pick(facts)
        old = [name for name in results[:done] if name != first]
        given = [name for name in facts if name != first]
        second = draw.pick(old if old and draw.chance(knobs.p_old) else given)
        plan.append((first, second, result))
        a, b = value[first], value[second]
        value[result] = (a + b) % 100 if knobs.carry else plus(a, b)

    draft = Draft()
    rows = [(f" {name}", *number(value[name]), ",") for name in draw.shuffled(names[:n_known])]
    draft.ask(" Facts", ":", *spread(rows, knobs.n_filler, draw), "\n", "Plan", ":")
    for label, (first, second, result) in zip(labels, plan, strict=False):
        draft.ask(label, f" {first}", " +", f" {second}", " =", f" {result}", ".")
    stop = labels[knobs.n_steps]
    draft.ask(stop, " Answer", ".", "\n", "Think", ":")

    for label, (first, second, result) in zip(labels, plan, strict=False):
        draft.write(FORM, label)
        draft.write(PLAN, f" {first}")
        draft.write(FORM, " +")
        draft.write(PLAN, f" {second}")
        draft.write(FORM, " =")
        draft.write(PLAN, f" {result}")
        draft.write(FORM, ";", f" {first}")
        draft.write(FACT, *number(value[first]))
        draft.write(FORM, " +", f" {second}")
        draft.write(FACT, *number(value[second]))
        draft.write(FORM, " =", f" {result}")
        draft.write(RESULT, *number(value[result]))
        draft.write(FORM, ".")
        draft.end_step()
    draft.write(FORM, stop)
    draft.write(ANSWER, " Answer")
    draft.box(*number(value[results[-1]]))
    return draft.finish(f"{value[results[-1]]:02d}")


def score(problem: Problem, output: str) -> Score:
    """Return the scores of an output. exact: 1 if the boxed answer is right. partial: the share of steps before the
    first wrong step."""
    text = said(output)
    answer = boxed(text)
    return Score(float(answer == problem.answer), right_steps(problem, text) / len(problem.steps), answer)
