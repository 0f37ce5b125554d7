"""Writes figures for print: NAME.svg and NAME.pdf in the light theme, and NAME.txt with title and caption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import SetupError, quote
from kvbench.report.plots import draw
from kvbench.report.plots.figure import Figure
from kvbench.store.files import reason, replacing


def write(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write every figure with its caption into a folder; return the paths of the written files. Raises SetupError if a
    file cannot be written."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            drawn = draw.svg(figure)
            caption = f"{figure.title}. {figure.caption}\n"
            for suffix, content in (("svg", drawn.encode()), ("pdf", draw.pdf(drawn)), ("txt", caption.encode())):
                paths.append(folder / f"{figure.name}.{suffix}")
                with replacing(paths[-1]) as file:
                    file.write(content)
    except OSError as error:
        raise SetupError(f"cannot write plots in {quote(folder)} ({reason(error)}). Give another folder.") from None
    return paths
