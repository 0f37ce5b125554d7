"""Rows that several runs have: each counts once, and for each pair of runs a line says how many were left out.

    rows, lines = each_once(Rows.of(tables))

Rows with equal keys are the same row. An ok row counts before a failed one, then the row of the run that was named
first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.errors import bare
from kvbench.report.rows import KEY, RUN, Rows

if TYPE_CHECKING:
    from kvbench.report.rows import Ints

MOST = 4  # pairs of runs that get a line


def each_once(rows: Rows) -> tuple[Rows, list[str]]:
    """Return the rows, one per key and without the column of keys, and a line per pair of runs with rows left out."""
    import numpy as np

    counting = _counting(rows)
    counts = counting == np.arange(len(rows))
    if counts.all():
        return rows.without(KEY), []
    return rows.where(counts).without(KEY), _lines(rows.where(~counts), rows.where(counting[~counts]))


def _counting(rows: Rows) -> Ints:
    """Return for each row the position of the row that counts for its key."""
    import numpy as np

    keys = rows.text(KEY).codes
    order = np.argsort(~rows.text("status").is_one_of("ok"), kind="stable")
    first = np.empty(int(keys.max()) + 1, dtype=np.int64)
    first[keys[order][::-1]] = order[::-1]  # of equal keys the last assignment stays: the first in order
    return np.asarray(first[keys])


def _lines(left: Rows, kept: Rows) -> list[str]:
    """Return a line for each pair of runs. left: the rows left out; kept: for each of them, the row that counts
    instead."""
    import numpy as np

    other = (left.number("score") != kept.number("score")) & ~(
        np.isnan(left.number("score")) & np.isnan(kept.number("score"))
    )
    runs, lines = left.text(RUN), []
    pairs = list(left.parts(runs.codes, kept.text(RUN).codes))
    for (loser, winner), part in pairs[:MOST]:
        count, differing = len(part), int(other[np.isin(left.places, part.places)].sum())
        scores = f"{differing} of {count} scores differ" if differing else "all scores are equal"
        lines.append(
            f"{_counted(count)} of {runs.names[loser]} left out: {runs.names[winner]} has the same rows, which count "
            f"({scores}). 'kvbench compare {bare(runs.names[loser])} {bare(runs.names[winner])}' tests one against the "
            "other."
        )
    if more := sum(len(part) for _, part in pairs[MOST:]):
        lines.append(f"{_counted(more)} of further runs left out, because other runs have the same row keys.")
    return lines


def _counted(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
