"""The images of a prompt: how many tokens stand for each image, and the pixel values that the model reads.

The size of an image alone decides how many tokens it has, so kvbench can plan a run without pixel values. The chat
template writes one image token per image. kvbench repeats this token until the image has all its tokens. Some model
families have further tokens before and after an image; kvbench adds these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvbench.errors import UserError, counted, quote
from kvbench.records import Images
from kvbench.sources import image_files
from kvbench.task import IMAGE, Image, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image of a question, and how many of the model's tokens stand for it."""

    image: Image
    sha256: str  # of the file
    width: int  # pixels
    height: int
    tokens: int

    def facts(self, turn: int, at: int | None) -> dict[str, Any]:
        """Return what a row of results stores about the image.

        turn: number of the turn to which the image belongs, from 1. at: the position, in characters, of the image's
        token in the first turn's prompt; None if that prompt does not hold the image.
        """
        size = {"width": self.width, "height": self.height}
        return {"name": self.image.name, **size, "tokens": self.tokens, "turn": turn, "at": at}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The image processor of a model, from transformers, and the token that stands for a part of an image.

    count: function that returns how many of these tokens an image has, from its height and width in pixels. token,
    text: the id and the text of this token. options: arguments of the image processor. around: the ids of the tokens
    that the model family puts before and after those of an image. template: the chat template that handles images, if
    the tokenizer's template does not.
    """

    processor: Any
    count: Callable[[int, int], int]
    options: Mapping[str, Any] = field(default_factory=dict)
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    token: int
    text: str  # the token's text, as the chat template writes it
    template: str | None = None
    _known: dict[Image, Picture] = field(default_factory=dict)

    def pictures(self, turns: Iterable[Turn]) -> list[Picture]:
        """Return the images of the turns, in order. Each image is decoded at its first use. Raises UserError for a
        broken file, or for an image whose size does not suit the model."""
        return [self._picture(image) for turn in turns for image in turn.images]

    def _picture(self, image: Image) -> Picture:
        if image not in self._known:
            self._known[image] = self._measured(image)
        return self._known[image]

    def _measured(self, image: Image) -> Picture:
        pixels = image_files.read(image)
        width, height = pixels.image.size
        try:
            tokens = self.count(height, width)
        except ValueError as error:  # such as an image that is too narrow
            raise UserError(
                f"image {quote(image.name)} of {width}x{height} pixels does not suit the model: {error}. Replace the "
                "image."
            ) from None
        return Picture(image=image, sha256=pixels.sha256, width=width, height=height, tokens=tokens)

    def added(self, turns: Iterable[Turn]) -> int:
        """Return how many tokens, at most, the images of these turns add to the tokens of their text."""
        return sum(picture.tokens + sum(map(len, self.around)) for picture in self.pictures(turns))

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], Images | None]:
        """Replace each image token in `ids` by all tokens of its image, with the tokens `around` before and after them.

        `ids` holds one image token per image. Returns the new ids, and the images for the engine (None without images).
        """
        left = iter(pictures)
        spans: list[tuple[int, int]] = []
        expanded: list[int] = []
        for token in ids:
            if token != self.token:
                expanded.append(token)
                continue
            before, after = self.around
            expanded += before
            spans.append((len(expanded), len(expanded) + next(left).tokens))
            expanded += [token] * (spans[-1][1] - spans[-1][0])
            expanded += after
        images = Images(spans=tuple(spans), read=partial(self.read, tuple(pictures))) if pictures else None
        return expanded, images

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, Any]]:
        """Return the model's inputs for each image. Raises UserError for a file that changed."""
        files = [image_files.read(picture.image) for picture in pictures]
        for picture, file in zip(pictures, files):
            if file.sha256 != picture.sha256:
                raise UserError(f"image {quote(picture.image.name)} changed during the run. Restore the file.")
        made = dict(self.processor(images=[file.image for file in files], return_tensors="pt", **self.options))
        rows = _rows(made, len(files))
        made.pop("num_patches", None)  # no argument of the model
        parts = {name: value.split(rows if name == "pixel_values" else 1) for name, value in made.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(files))]


def _rows(made: Mapping[str, Any], images: int) -> list[int]:
    """Return how many rows of the tensor `pixel_values` belong to each image.

    There is one row per patch or tile, or one row per image if `made` counts neither patches nor tiles. made: the
    output of the image processor. images: the number of images.
    """
    if "image_grid_thw" in made:
        return [int(rows) for rows in made["image_grid_thw"].prod(-1)]
    return [int(rows) for rows in made.get("num_patches", [1] * images)]


def check_markers(turns: Iterable[Turn], question: str) -> None:
    """Raise UserError unless the text of each turn with images holds one `IMAGE` per image. question: the question's
    name, for messages."""
    for turn in turns:
        if turn.images and (markers := turn.user.count(IMAGE)) != len(turn.images):
            raise UserError(
                f"{question} has a turn with {counted(len(turn.images), 'image')}, but "
                f"{counted(markers, 'place')} for images (U+FFFC) in its text. Give one place per image."
            )
