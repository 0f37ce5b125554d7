"""Keeps one row if several runs have rows with the same key, and reports how many rows of each run were left out.

    rows, lines = each_once(Rows.of(tables), paths)

A row with the status ok is preferred to a row that failed or waits for a score. If that does not decide, the row of the
run that the user named first is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import counted
from kvbench.report.rows import KEY, RUN, Rows
from kvbench.store import again

if TYPE_CHECKING:
    from kvbench.report.rows import Ints

MOST = 4  # pairs of runs that have a separate line; all further pairs share a line


def each_once(rows: Rows, paths: Mapping[str, Path]) -> tuple[Rows, list[str]]:
    """Return two values: the rows, one per key and without the column of keys, and lines for the user on the rows that
    are left out. paths: the folder or table of each run, by the run's name."""
    import numpy as np

    counting = _counting(rows)
    counts = counting == np.arange(len(rows))
    if counts.all():
        return rows.without(KEY), []
    return rows.where(counts).without(KEY), _lines(rows.where(~counts), rows.where(counting[~counts]), paths)


def _counting(rows: Rows) -> Ints:
    """Return for each row the position of the kept row with the same key. Of rows with equal keys, one is kept."""
    import numpy as np

    keys = rows.text(KEY).codes
    order = np.argsort(~rows.text("status").is_one_of("ok"), kind="stable")
    first = np.empty(int(keys.max()) + 1, dtype=np.int64)
    first[keys[order][::-1]] = order[::-1]  # reversed: of equal keys, the first in `order` is assigned last and stays
    return np.asarray(first[keys])


def _lines(left: Rows, kept: Rows, paths: Mapping[str, Path]) -> list[str]:
    """Return lines for the user on the pairs of runs that have rows with the same keys. left: the rows that are left
    out. kept: for each of them the row with the same key that is kept. paths: see `each_once`."""
    import numpy as np

    lost, used = left.number("score"), kept.number("score")
    other = (lost != used) & ~(np.isnan(lost) & np.isnan(used))
    runs, lines = left.text(RUN), []
    pairs = list(left.parts(runs.codes, kept.text(RUN).codes))
    for (loser, winner), part in pairs[:MOST]:
        count, differing = len(part), int(other[np.isin(left.places, part.places)].sum())
        scores = f"{differing} of {count} scores differ" if differing else "all scores are equal"
        names = runs.names[loser], runs.names[winner]
        command = again.line(["kvbench", "compare", *(str(paths[name]) for name in names)])
        lines.append(
            f"{counted(count, 'row')} of {names[0]} left out: {names[1]} has the same rows, which are used instead "
            f"({scores}). To compare the two runs: {command}"
        )
    if more := sum(len(part) for _, part in pairs[MOST:]):
        lines.append(f"{counted(more, 'row')} of further runs left out, because other runs have the same row keys.")
    return lines
