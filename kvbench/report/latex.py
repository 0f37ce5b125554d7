r"""A report as LaTeX, for ``\input`` into an article: each table is a table environment with the rules of booktabs.

Every table has a label, as in ``\ref{tab:walk-orbit-100-1}``. A table wider than the page's column is scaled to fit.

    kvbench report results/demo --format latex > tables.tex

    \documentclass{article}
    \usepackage{booktabs,graphicx}
    \begin{document}
    \input{tables}
    \end{document}

The text is ASCII and compiles with every LaTeX engine. Every special character in the report's text is escaped, so that
the name of a model or a task cannot act as a command.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench import __version__
from kvbench.console import terminal
from kvbench.report.blocks import Block, Column

SIGNS = {
    **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    **{sign: f"${sign}$" for sign in "<>|"},
    **{sign: f"{{{sign}}}" for sign in "[]*"},  # without braces, LaTeX would read them as options of a preceding \\
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
    "`": r"\`{}",
    "±": r"$\pm$",
}
MINUS = re.compile(r"(?<![\w.)\]-])-(?=[0-9])")  # the sign of a number, not the hyphen in a name such as "snapkv-2"
DASHES = re.compile(r"(?<=-)(?=-)")  # two hyphens would become a dash


def escaped(text: str) -> str:
    """Escape a text, so that LaTeX finds no command in it and makes no dash of its hyphens; the result is ASCII."""
    parts = re.split(MINUS, terminal.clean(text))
    return "$-$".join(re.sub(DASHES, "{}", "".join(map(_sign, part))) for part in parts)


def _sign(sign: str) -> str:
    return SIGNS.get(sign) or (sign if sign.isascii() else rf"\textbackslash{{}}u{ord(sign):04x}")


def document(blocks: Iterator[Block], about: Sequence[str]) -> str:
    """Return the tables of the blocks as LaTeX, with the lines of `about` below all of them."""
    lines = [f"% kvbench {__version__}; needs \\usepackage{{booktabs,graphicx}}", ""]
    labels: set[str] = set()
    for block in blocks:
        lines += _tables(block, labels)
    lines += [rf"{{\footnotesize\raggedright {escaped(line)}\par}}" for line in about]
    return "\n".join(lines)


def _tables(block: Block, labels: set[str]) -> Iterator[str]:
    """Yield the LaTeX lines of a block's tables. Each table is a float; the notes of the block stand below the last
    table. labels: the labels already in use; the function adds those of the tables."""
    grids = list(block.tables())
    for number, columns in enumerate(grids, 1):
        of = f" ({number} of {len(grids)})" if len(grids) > 1 else ""
        yield from (
            r"\begin{table}[htbp]",
            r"\centering",
            r"\setlength{\abovecaptionskip}{0pt}\setlength{\belowcaptionskip}{6pt}",  # the caption stands above
            rf"\caption{{{escaped(block.title + of)}}}\label{{{_label(block.title, number, labels)}}}",
            r"\footnotesize\setlength{\tabcolsep}{4pt}",
        )
        yield from _tabular(columns, block.lines)
        yield r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi"
        for note in block.notes if number == len(grids) else ():
            yield rf"\par\smallskip\begin{{minipage}}{{\linewidth}}\raggedright {escaped(note)}\end{{minipage}}"
        yield from (r"\end{table}", "")


def _label(title: str, number: int, labels: set[str]) -> str:
    """Return a label for a table, and add it to `labels`. The label is the title up to its first comma, followed by the
    table's number in its block. In the title, hyphens replace everything but letters and digits. If this label is
    already in use, a count is added to it."""
    stem = re.sub(r"[^a-z0-9]+", "-", title.partition(",")[0].lower()).strip("-")
    free = (f"tab:{stem}{f'-{count}' if count > 1 else ''}-{number}" for count in itertools.count(1))
    label = next(label for label in free if label not in labels)
    labels.add(label)
    return label


def _tabular(columns: Sequence[Column], lines: Sequence[Any]) -> Iterator[str]:
    """Yield the LaTeX lines of one table. They put the table into TeX's box 0, so that TeX can compare the table's
    width with the width of the text."""
    sides = "".join("l" if place == 0 or column.left else "r" for place, column in enumerate(columns))
    yield rf"\sbox0{{\begin{{tabular}}{{{sides}}}"
    yield r"\toprule"
    yield _row([column.header for column in columns])
    yield r"\midrule"
    yield from (_row([column.text(line) for column in columns]) for line in lines)
    yield r"\bottomrule"
    yield r"\end{tabular}}"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(escaped, cells)) + r" \\"
