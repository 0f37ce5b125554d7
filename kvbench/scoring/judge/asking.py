"""Ask a judge until its reply can be parsed.

If no judge is set, or no reply can be parsed, the answer gets a score without a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.judge.api import Judge
from kvbench.task import Score

TRIES = 2  # requests until a reply holds a verdict
NO_JUDGE = Score(value=None, status="unscored", note="no judge was asked; 'kvbench score RUN --judge URL' asks one")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """The judge's verdict on one turn. value: the verdict; None if the judge gave none.

    invalid: number of replies without a verdict. judge: the judge model's name; "" if no judge was asked.
    """

    value: T | None
    invalid: int
    judge: str


def ask(judge: Judge, prompt: tuple[Any, ...], read: Callable[[str], T | None]) -> Asked[T]:
    """Ask the judge until a reply holds a verdict, at most `TRIES` times.

    prompt: the arguments of `Judge.ask`. read: returns the verdict in a reply, or None; it receives the reply without
    its thinking block.
    """
    invalid, value, model = 0, None, ""
    while value is None and invalid < TRIES:
        reply = judge.ask(*prompt)
        value, model = read(after_thinking(reply.text, None)), reply.model
        invalid += value is None
    return Asked(value, invalid, model)


def judged_by(judge: str, mode: str) -> dict[str, str | bool | None]:
    """Return {"judge": text}, the row's column of this name.

    The text holds the judge model's name (`judge`), today's date (UTC), and how the model judged (`mode`).
    """
    return {"judge": f"{judge}, {datetime.now(UTC):%Y-%m-%d}, {mode}"}


def failed(note: str) -> Score:
    return Score(value=None, status="judge_error", facts={"judge": None}, note=note)
