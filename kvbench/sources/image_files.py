"""Decodes the image files of questions into RGB pixels, and refuses files that are too large, incomplete or of an
unsupported format."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbench.console import faults
from kvbench.errors import SetupError, UserError, quote
from kvbench.sources.data import read_plain
from kvbench.task import Image

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_BYTES = 64 << 20  # of a file
MOST_PIXELS = 64 << 20
EXTRA = "Install it with 'pip install \"kvbench[vision]\"'."


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """The RGB pixels of an image file, and the SHA-256 of the file."""

    image: PIL.Image.Image
    sha256: str


def read(image: Image) -> Pixels:
    """Read and decode an image.

    Raises UserError for a file that cannot be read, is too large, or changed since it was hashed. Raises UserError also
    for a file that is not a complete PNG, JPEG or WebP with at most 8 bits per colour. Raises SetupError if Pillow is
    missing.
    """
    data = _bytes(image)
    digest = hashlib.sha256(data).hexdigest()
    if image.sha256 and digest != image.sha256:
        raise _unusable(image.name, "changed during the run")
    return Pixels(image=_decode(image.name, data), sha256=digest)


def encoded(image: Image) -> bytes:
    """Return the bytes of an image's file, after the checks that `read` makes. Raises as `read` does."""
    data = _bytes(image)
    read(replace(image, path=None, data=data))
    return data


def _bytes(image: Image) -> bytes:
    if image.path is None:
        return image.data
    return read_plain(image.path, f"image {quote(image.path)}", MOST_BYTES)


def _decode(name: str, data: bytes) -> PIL.Image.Image:
    try:
        import PIL.Image
    except ImportError:
        raise SetupError(f"questions with images need Pillow. {EXTRA}") from None
    too_large = _unusable(name, f"has more than {MOST_PIXELS:,} pixels. Make it smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise too_large
            return _rgb(name, image)
    except UserError:
        raise
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError):
        raise too_large from None
    except PIL.UnidentifiedImageError:
        raise _unusable(name, "is no PNG, JPEG or WebP file. Save it as one of them") from None
    except Exception as error:  # decoders raise many types for broken files
        if faults.of_machine(error):
            raise
        raise _unusable(name, f"is broken ({quote(faults.first_line(error))}). Copy it again") from None


def _rgb(name: str, image: PIL.Image.Image) -> PIL.Image.Image:
    """Decode the first frame, rotate it by its EXIF orientation, and fill transparent parts with white."""
    from PIL import Image, ImageOps

    if image.mode.startswith(("I", "F")):
        raise _unusable(name, "has more than 8 bits per colour. Save it with 8 bits")
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _unusable(name: str, why: str) -> UserError:
    return UserError(f"image {quote(name)} {why}.")
