"""Ask a judge until its reply can be parsed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.judge.api import Judge, JudgeError
from kvbench.scoring.judge.settings import connect
from kvbench.task import Score, Services

TRIES = 2  # requests until a reply holds a verdict
NO_JUDGE = Score(value=None, status="unscored", note="no judge was asked; 'kvbench score RUN --judge URL' asks one")

T = TypeVar("T")
P = ParamSpec("P")


def judged(grade: Callable[Concatenate[Judge, P], T]) -> Callable[Concatenate[Services, P], T | Score]:
    """Return `grade` as a function that takes a run's `Services` in place of the judge, and connects to the judge that
    they name.

    The returned function gives a score without a value if no judge is set or a request to the judge fails. It raises
    KeyRefused if the server refuses the key, SetupError if a local judge cannot be used, and the errors of `connect`
    for invalid settings.
    """

    @functools.wraps(grade)
    def by_services(services: Services, /, *args: P.args, **kwargs: P.kwargs) -> T | Score:
        judge = connect(services)
        if judge is None:
            return NO_JUDGE
        try:
            return grade(judge, *args, **kwargs)
        except JudgeError as error:
            return failed(str(error))

    return by_services


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """The judge's verdict on one turn. value: the verdict; None if the judge gave none.

    invalid: number of replies without a verdict. judge: the judge model's name; "" if no judge was asked.
    """

    value: T | None
    invalid: int
    judge: str


def ask(judge: Judge, prompt: tuple[Any, ...], read: Callable[[str], T | None]) -> Asked[T]:
    """Ask the judge until a reply holds a verdict, at most `TRIES` times. prompt: the arguments of `Judge.ask`. read:
    returns the verdict in a reply, or None; it receives the reply without its thinking block."""
    invalid, value, model = 0, None, ""
    while value is None and invalid < TRIES:
        reply = judge.ask(*prompt)
        value, model = read(after_thinking(reply.text, None)), reply.model
        invalid += value is None
    return Asked(value, invalid, model)


def judged_by(judge: str, mode: str) -> dict[str, str | bool | None]:
    """Return the row's column "judge": the judge model's name, today's date (UTC) and how the model judged (`mode`)."""
    return {"judge": f"{judge}, {datetime.now(UTC):%Y-%m-%d}, {mode}"}


def failed(note: str) -> Score:
    return Score(value=None, status="judge_error", facts={"judge": None}, note=note)
