"""Draws a command's figures into the folder that the option --plot names, and prints the paths of the files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.console import terminal
from kvbench.report import plots


def draw(figures: Sequence[plots.Figure], folder: str) -> None:
    """Write every figure into a folder, and print the paths of the written files on stderr."""
    for path in plots.write(figures, Path(folder)):
        print(f"wrote {terminal.clean(str(path))}", file=sys.stderr)
