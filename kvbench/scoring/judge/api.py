"""The interface of a judge, and its errors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbench.errors import SetupError

MAX_TOKENS = 2048  # most tokens of a reply unless a request sets a limit; the same number as in FastChat's llm_judge


class JudgeError(Exception):
    """The judge gave no usable reply to one request.

    The exception's text becomes the row's note; it never holds a key.
    """


class KeyRefused(SetupError):
    """The judge's server refuses the API key (HTTP status 401 or 403).

    The server would refuse every later request too, so the run ends.
    """


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply to one request: the text, and the judge model's name, which is stored in the row."""

    text: str
    model: str


class Judge(Protocol):
    """A model that answers requests at temperature 0, one per call. Several threads may ask at once."""

    def ask(self, system: str, user: str, images: Sequence[bytes] = (), max_tokens: int = MAX_TOKENS) -> Reply:
        """Return the judge's reply. Raises JudgeError, KeyRefused, or SetupError if a local judge cannot be used.

        system: "" for no system message. images: the bytes of image files, which the judge sees after the text.
        max_tokens: most tokens of the reply.
        """


def messages(system: str, user: str, images: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """Return a request as the messages of a chat, in the form of OpenAI's interface."""
    shown = [{"type": "image_url", "image_url": {"url": _address(image)}} for image in images]
    content = [{"type": "text", "text": user}, *shown] if shown else user
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]


def _address(image: bytes) -> str:
    """Return an image file as a `data:` address, which holds its bytes and its type (read from the first bytes)."""
    kind = "png" if image.startswith(b"\x89PNG") else "webp" if image[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
