"""Encodes the images of a question for a page: small JPEGs as `data:` addresses, encoded from the images' pixels.

Only the pixels of an image's file reach the page, never its metadata. `kvbench.sources.image_files` refuses SVG, which
may hold scripts, and images that are too large.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.sources import image_files
from kvbench.task import Image

if TYPE_CHECKING:
    import PIL.Image

LONGEST = 1024  # pixels, the longer side of an image on the page
QUALITY = 90
MOST_BYTES = 16_000_000  # of all images of a page


@dataclass(frozen=True, slots=True)
class Embedded:
    """An image for a page. sha256: the hash of the image's file. uri: the image's `data:` address; empty if the page
    has no room left."""

    sha256: str
    uri: str


def embedded(images: Sequence[Image]) -> list[Embedded]:
    """Read and encode images, in their order. Raises UserError for an image that is missing, broken or too large, and
    SetupError if Pillow is missing."""
    made: list[Embedded] = []
    left = MOST_BYTES
    for image in images:
        pixels = image_files.read(image)
        uri = _uri(pixels.image) if left else ""
        left = max(0, left - len(uri))
        made.append(Embedded(pixels.sha256, uri if left else ""))
    return made


def _uri(image: PIL.Image.Image) -> str:
    from PIL import Image as images

    bare = images.frombytes("RGB", image.size, image.tobytes())  # a copy without the file's colour profile and comments
    bare.thumbnail((LONGEST, LONGEST))
    file = io.BytesIO()
    bare.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
