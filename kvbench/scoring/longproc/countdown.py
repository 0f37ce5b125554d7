"""Score a countdown: accuracy and partial score are 1 for three equations that reach the target. Otherwise accuracy is
0, and the partial score rates the search procedure.

LongProc evaluates the left side of an equation as Python. This module accepts only a sum, difference, product or
quotient of two integers. The verdicts are the same, with one exception: a division by zero or a broken expression ends
LongProc's script, and counts as wrong here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvbench.scoring.longproc.tags import between, result

SEARCH = "# Search Procedure"
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def score_countdown(text: str, numbers: Sequence[int], target: int, search: str) -> dict[str, float]:
    """Score an output as LongProc's `eval_countdown` does.

    numbers: the numbers that the equations may use. search: the right search procedure: a first line, then one action
    per line. If the first line of the output's procedure differs, the partial score is 0. Otherwise the partial score
    is the share of the actions in `search` that the output has right before its first wrong action.

    An action is right if it equals the action in the same line of `search`. If both lines hold an equation, their texts
    after "=" may differ, but both or neither must contain "drop this branch". If all compared actions are right,
    LongProc leaves the last one out of the count, and so does kvbench. If the output's procedure has only the first
    line, LongProc's partial score is below 0, and kvbench's is 0.
    """
    solution = between(text, "Solution")
    if solution is not None and _solves(solution, numbers, target):
        return result(1.0, 1.0, True)
    partial = _same_actions(text.split(SEARCH)[-1], search) if SEARCH in text else 0.0
    return result(0.0, partial, solution is not None)


def _solves(solution: str, numbers: Sequence[int], target: int) -> bool:
    lines, left = solution.split("\n"), list(numbers)
    if len(lines) != 3:
        return False
    for line in lines:
        equation = _equation(line)
        if equation is None:
            return False
        *operands, value = equation
        for number in operands:
            if number not in left:
                return False
            left.remove(number)
        left.append(value)
    return left[0] == target


def _equation(line: str) -> tuple[int, int, int] | None:
    """Return both operands and the value of a true equation of integers, such as "19 - 7 = 12"; else None."""
    left, _, right = line.partition("=")
    sign = next((sign for sign in _OPERATORS if sign in left), None)
    if sign is None:
        return None
    try:
        first, second = map(int, left.split(sign))
        value = int(right)
        return (first, second, value) if _OPERATORS[sign](first, second) == value else None
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _same_actions(procedure: str, search: str) -> float:
    lines, wanted = procedure.strip().split("\n"), search.strip().split("\n")
    if lines[0] != wanted[0] or len(wanted) < 2:
        return 0.0
    pairs = list(zip(lines[1:], wanted[1:]))
    wrong = next((i for i, pair in enumerate(pairs) if not _same_action(*pair)), len(pairs) - 1)
    return max(0, wrong) / (len(wanted) - 1)


def _same_action(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    if "Pick two numbers" in wanted:
        return False
    drops = ("drop this branch" in line) == ("drop this branch" in wanted)
    return drops and line.split("=")[0] == wanted.split("=")[0]
