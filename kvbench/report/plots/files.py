"""Writes figures for print: NAME.svg and NAME.pdf in the light theme, and captions.txt with the caption of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import SetupError, quote
from kvbench.report.plots import captions, draw
from kvbench.report.plots.figure import Figure
from kvbench.store.files import reason, replacing

SUFFIXES = ("svg", "pdf")


def write(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write every figure and the captions into a folder; return the paths. Raises SetupError if a file cannot be
    written."""
    paths = []

    def put(name: str, content: bytes) -> None:
        paths.append(folder / name)
        with replacing(paths[-1]) as file:
            file.write(content)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            drawn = draw.svg(figure)
            for suffix, content in zip(SUFFIXES, (drawn.encode(), draw.pdf(drawn)), strict=True):
                put(f"{figure.name}.{suffix}", content)
        if figures:
            put(captions.FILE, captions.text(figures, SUFFIXES).encode())
    except OSError as error:
        raise SetupError(f"cannot write plots in {quote(folder)} ({reason(error)}).") from None
    return paths
