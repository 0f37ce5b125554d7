"""The images of a prompt as the model reads them: how many tokens stand for each, and pixel values when it is read.

Covers families whose image processor gives each image a grid of patches, of which `merge_size` by `merge_size` become
one token (Qwen2-VL and its successors). Sizes alone decide the tokens, so that a plan needs no pixel values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def facts(self, turn: int) -> dict[str, Any]:
        """Return what a row stores of the image. turn: number of the turn that it belongs to, from 1."""
        size = {"width": self.width, "height": self.height}
        return {"name": self.image.name, **size, "tokens": self.tokens, "turn": turn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The image processor of a model, from transformers, and the token that stands for a part of an image.

    template: the chat template that handles images, where it is not the tokenizer's.
    """

    processor: Any
    token: int
    text: str  # of the token, as the chat template writes it
    template: str | None = None
    _known: dict[Image, Picture] = field(default_factory=dict)

    def pictures(self, turns: Iterable[Turn]) -> list[Picture]:
        """Return the images of these turns in their order. Every image is decoded once, which shows broken files."""
        return [self._picture(image) for turn in turns for image in turn.images]

    def _picture(self, image: Image) -> Picture:
        if image not in self._known:
            self._known[image] = self._measured(image)
        return self._known[image]

    def _measured(self, image: Image) -> Picture:
        pixels = image_files.read(image)
        width, height = pixels.image.size
        try:
            patches = self.processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:  # too narrow
            raise UserError(f"image {quote(image.name)} of {width}x{height} pixels: {error}.") from None
        tokens = patches // self.processor.merge_size**2
        return Picture(image=image, sha256=pixels.sha256, width=width, height=height, tokens=tokens)

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], Images | None]:
        """Repeat the image token in `ids`, which stands there once per image, as often as each image has tokens.

        Returns the ids, and the images for the engine (None without images).
        """
        left = iter(pictures)
        spans: list[tuple[int, int]] = []
        expanded: list[int] = []
        for token in ids:
            count = next(left).tokens if token == self.token else 1
            if token == self.token:
                spans.append((len(expanded), len(expanded) + count))
            expanded += [token] * count
        images = Images(spans=tuple(spans), inputs=partial(self._inputs, tuple(pictures))) if pictures else None
        return expanded, images

    def _inputs(self, pictures: Sequence[Picture], wanted: range) -> Mapping[str, Any]:
        """Return what the model reads of the images with these indices. Raises UserError for a file that changed."""
        chosen = [pictures[i] for i in wanted]
        files = [image_files.read(picture.image) for picture in chosen]
        for picture, file in zip(chosen, files):
            if file.sha256 != picture.sha256:
                raise UserError(f"image {quote(picture.image.name)} changed during the run.")
        made = self.processor(images=[file.image for file in files], return_tensors="pt")
        tokens = (made["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist()
        if tokens != [picture.tokens for picture in chosen]:
            raise RuntimeError(f"the image processor made {tokens} tokens, unlike its own count")
        return dict(made)


def check_markers(turns: Iterable[Turn], question: str) -> None:
    """Raise UserError unless every turn with images holds `IMAGE` once for each. question: its name, for messages."""
    for turn in turns:
        if turn.images and (markers := turn.user.count(IMAGE)) != len(turn.images):
            raise UserError(
                f"{question} has a turn with {counted(len(turn.images), 'image')}, but "
                f"{counted(markers, 'place')} for images in its text."
            )
