"""What a judge is, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbench.errors import SetupError

MAX_TOKENS = 2048  # of a reply, as FastChat's llm_judge asks for


class JudgeError(Exception):
    """The judge gave no usable reply to one question. The text is the row's note; it never holds a key."""


class KeyRefused(SetupError):
    """The judge does not let us in (401, 403). No other answer would fare better, so the run ends."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge said. `model`: who said it, for the row."""

    text: str
    model: str


class Judge(Protocol):
    """A model that is asked one question at a time, at temperature 0. Several threads may ask at once."""

    def ask(self, system: str, user: str) -> Reply:
        """Raises JudgeError, KeyRefused, or SetupError when there is no such judge at all."""
