"""The outcomes of one check of an invariant."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from kvbench.console.redact import redact_keys
from kvbench.errors import bare

Mark = Literal["ok", "FAIL", "n/a"]
EVICTS_NOTHING = "the method evicts nothing"
DROPPED_NOTHING = "the method dropped nothing in sequences this short"
LONGEST = 300  # characters of a reason


class Broken(Exception):
    """Raised if an invariant does not hold; the message has the wrong value and where it occurred."""


class NotApplicable(Exception):
    """Raised if an invariant cannot be checked for this method and model; the message says why."""


class Stopped(Exception):
    """Raised if a generation of the audit ended with an exception, which the attribute `error` holds."""

    def __init__(self, error: Exception) -> None:
        super().__init__(in_one_line(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of checking one invariant for one method, on one model and in one layout.

    layout: "dense", "paged" or a special way of running (`exam.Special`); "" if the check belongs to none of these.
    """

    method: str
    invariant: str
    model: str
    layout: str
    verdict: Mark
    reason: str


def in_one_line(error: BaseException) -> str:
    """Return an exception as one line of text: its type, the first line of its message, and where it was raised. For an
    error raised inside an installed package such as torch, the place is the line that called the package."""
    lines = str(error).splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename] or frames
    where = f" ({own[-1].filename.rpartition('/')[2]}, line {own[-1].lineno})" if own else ""
    text = bare(redact_keys(lines[0]))
    return f"{type(error).__name__}: {text[:LONGEST]}{where}"
