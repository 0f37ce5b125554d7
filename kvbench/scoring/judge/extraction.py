"""Let a judge extract the answer from a model's text, as MathVista does (bundled/mathvista, CC BY-SA 4.0)."""

from __future__ import annotations

from kvbench.scoring.judge.api import JudgeError
from kvbench.scoring.judge.asking import NO_JUDGE, Asked, ask, failed
from kvbench.scoring.judge.settings import connect
from kvbench.sources.data import BUNDLED
from kvbench.task import Score, Services

FILE = BUNDLED / "mathvista" / "extract_answer.txt"


def extract(services: Services, query: str, response: str) -> Asked[str] | Score:
    """Return the answer that the judge finds in a model's `response` to a `query`.

    If no judge is set, the judge fails, or all its replies are empty, return a score without a value instead. Raises
    KeyRefused, and SetupError if a local judge cannot be used.
    """
    judge = connect(services)
    if judge is None:
        return NO_JUDGE
    examples = FILE.read_text(encoding="utf-8").strip()
    try:
        asked = ask(judge, ("", f"{examples}\n\n{query}\n\n{response}\n\nExtracted answer: "), _stripped)
    except JudgeError as error:
        return failed(str(error))
    return failed("the judge's replies are empty") if asked.value is None else asked


def _stripped(reply: str) -> str | None:
    return reply.strip() or None
