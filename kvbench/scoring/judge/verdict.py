"""Let a judge say whether an answer is right, with yes or no, as LongMemEval does (bundled/longmemeval, MIT licence).

The judge gets one of five released prompts: the prompt for the type of the question, or the prompt for questions
without an answer. The judge replies in at most 10 tokens; "yes" anywhere in the reply means right. After a reply with
neither "yes" nor "no" kvbench asks once more; after a second such reply the answer has no score. (The released script
counts such a reply as wrong.)
"""

from __future__ import annotations

import json

from kvbench.scoring.judge.api import Judge
from kvbench.scoring.judge.asking import ask, failed, judged, judged_by
from kvbench.sources.data import BUNDLED
from kvbench.task import Score

FILE = BUNDLED / "longmemeval" / "judge_prompts.json"
MAX_TOKENS = 10  # most tokens of a reply, as in the released script
ABSTENTION, ANSWER = "abstention", "answer"  # names of prompts; all other prompts have the names of types of questions


@judged
def verdict(judge: Judge, kind: str, question: str, reference: str, response: str) -> Score:
    """Return a score of 1 if the judge finds a model's `response` to a question right, 0 if wrong.

    kind: the type of the question, or `ABSTENTION` for a question without an answer; a type without a prompt of its own
    gets the prompt `ANSWER`.
    """
    prompts: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    text = prompts.get(kind, prompts[ANSWER]).format(question=question, answer=reference, response=response)
    asked = ask(judge, ("", text, (), MAX_TOKENS), _right)
    if asked.value is None:
        return failed("the judge's replies say neither yes nor no")
    aux = {"invalid": float(asked.invalid)}
    return Score(value=asked.value, aux=aux, facts=judged_by(asked.judge, "yes or no"))


def _right(reply: str) -> float | None:
    said = reply.lower()
    return 1.0 if "yes" in said else 0.0 if "no" in said else None
