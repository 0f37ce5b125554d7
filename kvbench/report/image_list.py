"""Reads the columns of a row that describe images: the question's images, their places in its prompt, and the shares of
text tokens and image tokens that the cache still held at the end.

The row may come from a stranger's run folder: the names of images are shown as text, and never opened as paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import bare, counted
from kvbench.store.strict_json import parse

MOST = 256  # images of a question
KEPT = {"kept_text": "text", "kept_images": "images"}  # columns with the share of tokens that the cache held at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedImage:
    """An image of a question. at: how many characters of the stored prompt stand before the image; None: the image is
    not in that prompt, or its place was not recorded."""

    number: int  # from 1, over all turns
    name: str
    width: int
    height: int
    tokens: int
    turn: int
    at: int | None

    @property
    def text(self) -> str:
        """Return one safe line: ``image 1: a.png, 48x32 pixels, 6 tokens, turn 1``."""
        size = f"{self.width}x{self.height} pixels, {counted(self.tokens, 'token')}"
        return f"image {self.number}: {bare(self.name)}, {size}, turn {self.turn}"


def images(stored: object) -> list[ListedImage]:
    """Return the images that a row lists. stored: the value of the row's column of images. The result is empty if this
    value is no list of images, or lists more than MOST images."""
    try:
        listed = parse(stored) if isinstance(stored, str) else None
    except ValueError:
        return []
    if not isinstance(listed, list) or len(listed) > MOST or not all(map(_fits, listed)):
        return []
    numbers = ("width", "height", "tokens", "turn")
    return [
        ListedImage(number=n, name=image["name"], at=image.get("at"), **{key: image[key] for key in numbers})
        for n, image in enumerate(listed, 1)
    ]


def split(prompt: str, listed: list[ListedImage]) -> list[str | ListedImage]:
    """Split a prompt at the places of the images in `listed`; return the prompt's texts with the images between them.
    If the places are not in order, or if one is beyond the prompt's end, return the whole prompt without images."""
    inside = [image for image in listed if image.at is not None]
    places = [image.at or 0 for image in inside]
    if places != sorted(places) or any(place > len(prompt) for place in places):
        return [prompt]
    parts: list[str | ListedImage] = []
    for start, stop, image in zip([0, *places], [*places, len(prompt)], [*inside, None]):
        parts += [prompt[start:stop], *([image] if image else [])]
    return parts


def kept_shares(row: Mapping[str, Any]) -> list[str]:
    """Return the shares of tokens that a row's cache kept, in words: "25% of images kept"; an empty list for a question
    without images."""
    shares = ((kind, row.get(column)) for column, kind in KEPT.items())
    return [f"{share:.0%} of {kind} kept" for kind, share in shares if share is not None and share == share]


def _fits(image: Any) -> bool:
    return (
        isinstance(image, dict)
        and isinstance(image.get("name"), str)
        and all(_count(image.get(key)) for key in ("width", "height", "tokens", "turn"))
        and (image.get("at") is None or _count(image["at"]))
    )


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31
