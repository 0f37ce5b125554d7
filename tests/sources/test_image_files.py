"""Image files of questions: what is read, how it becomes RGB, and what is refused."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from support.vision import picture

from kvbench.errors import SetupError, UserError
from kvbench.sources import image_files
from kvbench.task import Image


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image(name="x", data=file.getvalue())


def corner(image: Image) -> Any:
    read = image_files.read(image).image
    assert read.mode == "RGB"
    return read.getpixel((0, 0))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_three_formats_are_read(kind: str) -> None:
    image = picture(kind=kind)
    read = image_files.read(image)
    assert read.image.size == (32, 32)
    assert read.sha256 == hashlib.sha256(image.data).hexdigest()


def test_every_mode_becomes_rgb() -> None:
    red = (255, 0, 0)
    assert corner(encoded(PIL.Image.new("RGBA", (8, 8), (*red, 0)))) == (255, 255, 255)  # clear lies on white
    assert corner(encoded(PIL.Image.new("RGBA", (8, 8), (*red, 255)))) == red
    palette = PIL.Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, *red])
    assert corner(encoded(palette)) == red
    assert corner(encoded(palette, transparency=1)) == (255, 255, 255)
    assert corner(encoded(PIL.Image.new("L", (8, 8), 7))) == (7, 7, 7)
    assert corner(encoded(PIL.Image.new("1", (8, 8), 1))) == (255, 255, 255)
    assert corner(encoded(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))[0] > 250


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert corner(moving) == (255, 0, 0)


def test_a_photo_is_turned_as_its_tag_says() -> None:
    tags = PIL.Image.Exif()
    tags[0x0112] = 6  # a quarter turn
    assert image_files.read(encoded(PIL.Image.new("RGB", (32, 16)), "JPEG", exif=tags)).image.size == (16, 32)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8200, 9600, 30_000, 2**31 - 1])  # own limit, Pillow's warning, Pillow's errors
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    with pytest.raises(UserError, match="image 'x' has more than 67,108,864 pixels"):
        image_files.read(Image(name="x", data=huge(side, side)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_is_refused(kind: str) -> None:
    whole = picture(size=(64, 64), kind=kind).data
    with pytest.raises(UserError, match=r"image 'x' is (broken|no PNG)"):
        image_files.read(Image(name="x", data=whole[: len(whole) // 2]))


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match="image 'x' is no PNG, JPEG or WebP file"):
        image_files.read(encoded(PIL.Image.new("RGB", (8, 8)), kind))


def test_text_is_no_image() -> None:
    for data in (b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0"):
        with pytest.raises(UserError, match="is no PNG, JPEG or WebP file"):
            image_files.read(Image(name="x", data=data))


def test_sixteen_bits_are_refused() -> None:
    with pytest.raises(UserError, match="more than 8 bits per colour"):
        image_files.read(encoded(PIL.Image.new("I;16", (8, 8), 1000)))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path, why in ((tmp_path / "none.png", "does not exist"), (tmp_path, "is a folder"), (pipe, "is a pipe")):
        with pytest.raises(UserError, match=f"image '{path}' {why}"):
            image_files.read(Image(name="x", path=path))


def test_without_pillow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SetupError, match=r"pip install \"kvbench\[vision\]\""):
        image_files.read(image)
