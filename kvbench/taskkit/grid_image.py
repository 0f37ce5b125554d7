"""Draw a grid of two-digit numbers as a PNG file whose bytes are the same everywhere.

Digits are the bitmaps below, enlarged, so no font and no version of FreeType matters. The file stores its pixels
without compression, so no version of an image library or of zlib matters either.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

CELL = 64  # pixels, width and height of a number's cell: two by two tokens of Qwen3-VL
SCALE = 4  # pixels, width and height of a dot of a digit
LINE = 2  # pixels, thickness of the grid's lines
BLOCK = 65535  # bytes, the most in a stored block of a deflate stream
DIGITS = tuple(
    tuple(rows.split())
    for rows in (
        ".###. #...# #..## #.#.# ##..# #...# .###.",
        "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
        ".###. #...# ....# ...#. ..#.. .#... #####",
        "##### ...#. ..#.. ...#. ....# #...# .###.",
        "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
        "##### #.... ####. ....# ....# #...# .###.",
        "..##. .#... #.... ####. #...# #...# .###.",
        "##### ....# ...#. ..#.. .#... .#... .#...",
        ".###. #...# #...# .###. #...# #...# .###.",
        ".###. #...# #...# .#### ....# ...#. .##..",
    )
)


def grid_png(numbers: Sequence[Sequence[int]]) -> bytes:
    """Return a PNG file that shows the numbers (10 to 99) row by row, black on white, with lines around them."""
    return _png(draw(numbers))


def draw(numbers: Sequence[Sequence[int]]) -> Any:
    """Return the picture's pixels as an array of bool; True is black."""
    import numpy as np

    black = np.zeros((len(numbers) * CELL, len(numbers[0]) * CELL), dtype=bool)  # [height, width]
    for edge in range(LINE):
        black[edge::CELL] = black[CELL - 1 - edge :: CELL] = True
        black[:, edge::CELL] = black[:, CELL - 1 - edge :: CELL] = True
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            label = _label(number)
            top = r * CELL + (CELL - label.shape[0]) // 2
            left = c * CELL + (CELL - label.shape[1]) // 2
            black[top : top + label.shape[0], left : left + label.shape[1]] = label
    return black


def _label(number: int) -> Any:
    """Return the pixels of a number: its two digits, with a gap of `SCALE` pixels between them."""
    import numpy as np

    rows = [".".join(parts) for parts in zip(*(DIGITS[int(digit)] for digit in str(number)))]
    dots = np.array([[dot == "#" for dot in row] for row in rows])
    return dots.repeat(SCALE, axis=0).repeat(SCALE, axis=1)


def _png(black: Any) -> bytes:
    """Return pixels as a PNG file with one bit per pixel and without compression."""
    import numpy as np

    height, width = black.shape
    rows = np.packbits(~black, axis=1)  # 1 is white; [height, bytes of a row]
    data = np.insert(rows, 0, 0, axis=1).tobytes()  # filter 0 before every row
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    stored = b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block for block in blocks
    )
    stream = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(data))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)  # one bit, greyscale
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", stream) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
