"""Small pictures for tests, drawn here, as encoded files."""

from __future__ import annotations

import io
from typing import Literal

from PIL import Image, ImageDraw


def picture(colour: str, kind: Literal["PNG", "JPEG", "WEBP"] = "PNG", size: tuple[int, int] = (48, 32)) -> bytes:
    """Return a picture with a circle of this colour."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((8, 4, 32, 28), fill=colour)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()
