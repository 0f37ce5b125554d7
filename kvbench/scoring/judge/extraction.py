"""Let a judge extract the answer from a model's text, as MathVista does (bundled/mathvista, CC BY-SA 4.0)."""

from __future__ import annotations

from kvbench.scoring.judge.api import Judge
from kvbench.scoring.judge.asking import Asked, ask, failed, judged
from kvbench.sources.data import BUNDLED
from kvbench.task import Score

FILE = BUNDLED / "mathvista" / "extract_answer.txt"


@judged
def extract(judge: Judge, query: str, response: str) -> Asked[str] | Score:
    """Return the answer that the judge finds in a model's `response` to a `query`. If all replies of the judge are
    empty, return a score without a value instead."""
    examples = FILE.read_text(encoding="utf-8").strip()
    asked = ask(judge, ("", f"{examples}\n\n{query}\n\n{response}\n\nExtracted answer: "), _stripped)
    return failed("the judge's replies are empty") if asked.value is None else asked


def _stripped(reply: str) -> str | None:
    return reply.strip() or None
