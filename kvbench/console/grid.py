"""Tables for a terminal. A table that is wider than the terminal is narrowed without breaking numbers.

    table = Grid(rule="-")
    table.add_column("method")
    table.add_row("snapkv-decode(variant=gkv)")
    console.print(table)

The widest columns are narrowed first. Cells are broken at blanks; if that is not enough, also after the hyphens,
slashes and plus signs of a name and before its bracket; if that is not enough either, anywhere in texts, first of
long words and then of all, but never in numbers. A table that is then still too wide is printed wider than the
terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement

BETWEEN = 2  # blanks between two columns
SHORTEST = 12, 4  # least characters per line of a text that is broken anywhere: first choice, last choice
UNLIMITED = 1_000_000
Pieces = Callable[[str], list[str]]  # splits a text into the parts that are not to be broken
# Where names may be broken: never between two digits, so that numbers and dates stay whole, nor in 1e-05.
BREAK = re.compile(r"(?<=(?:[^\W\d_]|\))[-/+])(?<!\d[eE][-+])(?=\w)|(?<=\d[-/+])(?=[^\W\d_])|(?<=\w)(?=\()")


@dataclass(slots=True)
class Grid:
    """A table of texts: a line `rule` below the titles, two blanks between columns. Cells may be rich's styled texts,
    which are never broken."""

    rule: str
    titles: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    _justify: list[Any] = field(default_factory=list)
    _whole: list[bool] = field(default_factory=list)

    def add_column(self, title: str, *, right: bool = False, whole: bool = False) -> None:
        """Add a column. right: align it at the right. whole: never break its cells."""
        self.titles.append(title)
        self._justify.append("right" if right else "left")
        self._whole.append(whole)

    def add_row(self, *cells: Any) -> None:
        self.rows.append(cells)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(*(self._total(self._widest(pieces)) for pieces in (_names, _lines)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table

        ascii_only = self.rule == "-"
        head = box.Box(f"    \n    \n {self.rule}{self.rule} \n    \n    \n    \n    \n    \n", ascii=ascii_only)
        table = Table(box=head, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        widths = self._widths(options.max_width)
        for title, justify, width in zip(self.titles, self._justify, widths):
            table.add_column(_broken(title, width), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(_broken(cell, width) for cell, width in zip(row, widths)))
        yield from console.render(table, options.update(max_width=UNLIMITED))

    def _widths(self, room: int) -> list[int]:
        """Return the number of characters per line of each column, so that the table fits into `room` characters if
        that is possible without breaking a number."""
        widths = self._widest(_lines)
        steps: list[Pieces] = [_words, _names, *(partial(_numbers, shortest) for shortest in SHORTEST)]
        for pieces in steps:
            least = self._widest(pieces)
            while self._total(widths) > room and (places := [i for i, w in enumerate(widths) if w > least[i]]):
                widths[max(places, key=widths.__getitem__)] -= 1
        return widths

    def _total(self, widths: Sequence[int]) -> int:
        return sum(widths) + BETWEEN * (len(widths) - 1)

    def _widest(self, pieces: Pieces) -> list[int]:
        """Return for each column the width of the widest of its pieces. pieces: splits a cell into parts that are not
        to be broken; columns that stay whole are not split."""
        from rich.cells import cell_len

        return [
            max((cell_len(p) for cell in column for p in (_lines if whole else pieces)(str(cell))), default=0)
            for whole, column in zip(self._whole, zip(self.titles, *self.rows))
        ]


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _words(text: str) -> list[str]:
    return text.split()


def _names(text: str) -> list[str]:
    return [piece for word in text.split() for piece in BREAK.split(word)]


def _numbers(shortest: int, text: str) -> list[str]:
    """Return the parts of a text that are not to be broken: pieces without letters, and the first `shortest` characters
    of other pieces."""
    return [piece[:shortest] if any(map(str.isalpha, piece)) else piece for piece in _names(text)]


def _broken(cell: Any, width: int) -> Any:
    """Return a text with line ends, so that no line is longer than `width`. A styled text is returned as it is."""
    if not isinstance(cell, str):
        return cell
    return "\n".join(broken for line in _lines(cell) for broken in _fill(line, width))


def _fill(line: str, width: int) -> list[str]:
    from rich.cells import cell_len, chop_cells

    if cell_len(line) <= width:
        return [line]
    lines = [""]
    for word in line.split():
        start = f"{lines[-1]} {word}".lstrip()
        if cell_len(start) <= width:
            lines[-1] = start
            continue
        lines.append("")
        for piece in [word] if cell_len(word) <= width else BREAK.split(word):
            first, *rest = [piece] if cell_len(piece) <= width else chop_cells(piece, width)
            if cell_len(lines[-1] + first) <= width:
                lines[-1] += first
            else:
                lines.append(first)
            lines += rest
    return [line for line in lines if line]
