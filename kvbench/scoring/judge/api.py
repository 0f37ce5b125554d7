"""The interface of a judge, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbench.errors import SetupError

MAX_TOKENS = 2048  # of a reply, as FastChat's llm_judge asks for


class JudgeError(Exception):
    """The judge gave no usable reply to one request. The text becomes the row's note; it never holds a key."""


class KeyRefused(SetupError):
    """The judge refuses the key (401, 403). It would refuse every other answer too, so the run ends."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply to one request: the text, and the judge model's name, which is stored in the row."""

    text: str
    model: str


class Judge(Protocol):
    """A model that answers one request at a time, at temperature 0. Several threads may ask at once."""

    def ask(self, system: str, user: str) -> Reply:
        """Return the judge's reply. Raises JudgeError, KeyRefused, or SetupError if the judge cannot be loaded."""
