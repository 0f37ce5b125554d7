"""MT-Bench's prompts for a judge, as in FastChat (bundled/mt_bench/judge_prompts.jsonl, Apache-2.0).

With `turn` 0, a prompt shows the first question and answer; with `turn` 1, it shows the whole conversation. Documents
with reference answers use the -math- forms, which show the reference. Braces in an answer are never read as a
placeholder.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

from kvbench.sources.data import BUNDLED
from kvbench.task import Doc

FILE = BUNDLED / "mt_bench" / "judge_prompts.jsonl"
_MARK = re.compile(r"\[\[(\d+\.?\d*|[ABC])\]\]")

Answers = Sequence[str]  # one per turn


def single(doc: Doc, answers: Answers, turn: int) -> tuple[str, str]:
    """Return the system and user text that ask for a rating of the answer at `turn` (0 or 1)."""
    first, second = _both(answers)
    return _fill("single-v1", "single-math-v1", doc, turn, answer=first, answer_1=first, answer_2=second)


def pair(doc: Doc, answers_a: Answers, answers_b: Answers, turn: int) -> tuple[str, str]:
    """Return the system and user text that ask which of two answers at `turn` (0 or 1) is better."""
    a, b = _both(answers_a), _both(answers_b)
    ours = {"answer_a": a[0], "answer_a_1": a[0], "answer_a_2": a[1]}
    theirs = {"answer_b": b[0], "answer_b_1": b[0], "answer_b_2": b[1]}
    return _fill("pair-v2", "pair-math-v1", doc, turn, **ours, **theirs)


def disarm(answer: str) -> str:
    """Put blanks into every mark such as ``[[10]]`` or ``[[A]]`` of an answer.

    If the judge quotes the answer, such a mark is then no verdict. Marks with single brackets, such as ``[10]``, stay
    as they are; they count only in a reply without ``[[x]]``.
    """
    return _MARK.sub(r"[[ \1 ]]", answer)


def _both(answers: Answers) -> tuple[str, str]:
    first, second = answers
    return disarm(first), disarm(second)


def _fill(plain: str, math: str, doc: Doc, turn: int, **answers: str) -> tuple[str, str]:
    prompt = _prompts()[(math if doc.reference else plain) + ("-multi-turn" if turn else "")]
    questions = [t.user for t in doc.turns]
    shown = {"question": questions[0], "question_1": questions[0], "question_2": questions[1]}
    if doc.reference:
        shown |= {"ref_answer_1": doc.reference[0], "ref_answer_2": doc.reference[1]}
    return prompt["system_prompt"], prompt["prompt_template"].format(**shown, **answers)


@functools.cache
def _prompts() -> dict[str, dict[str, str]]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
