"""Finds questions whose rows forbid a common table: a question with two prompts, or a sample with two rows."""

from __future__ import annotations

from typing import Any

from kvbench.errors import UserError, quote
from kvbench.report.cells import labels_of
from kvbench.report.rows import RUN, Rows

ALL = "all"  # value of --group-by that splits rows by everything that differs
APART = f"--group-by {ALL} makes separate tables."
EDITED = "The run's table was joined or edited. Report on the runs that its rows came from."
# Columns of numbers that name a sample of a cell, together with its question and its method with options.
NAMED_BY = ("budget", "budget_share", "interval", "sample")


def conflict(rows: Rows) -> UserError | None:
    """Return the error for a question of one task that had two prompts, or for two rows of one sample; None if neither
    occurs. `report.load` keeps one row per row key, so two rows of one sample have different keys: their data differ,
    for example in the reference answer, or one row lacks an option that the other has at its default."""
    if (question := with_several(rows, rows.text("prompt_sha256").codes)) is not None:
        mine = rows.where(rows.text("doc_id").is_one_of(question))
        first, other = (run_at(mine, place) for place, _ in mine.firsts("prompt_sha256")[:2])
        where = f"in {first} and {other}" if first != other else f"in {first} alone"
        return UserError(
            f"question {quote(question)} had two different prompts {where} (other data or template); "
            f"scores are not comparable. {APART if first != other else EDITED}"
        )
    if (twice := _one_sample_twice(rows)) is not None:
        first, other = (run_at(rows, place) for place in twice)
        question, method = (rows.text(name).list()[twice[0]] for name in ("doc_id", "method"))
        one, two = (rows.text("options").codes[place] for place in twice)
        why = "their data differ, for example in the reference answer"
        if one != two:
            why = "one lacks an option that the other has at its default"
        where = f"run {first} has two rows of {method} for one sample"
        if first != other:
            where = f"runs {first} and {other} each have a row of {method} for the same sample"
        return UserError(
            f"{where} of question {quote(str(question))} ({why}); "
            f"scores are not comparable. {APART if first != other else EDITED}"
        )
    return None


def with_several(rows: Rows, values: Any) -> str | None:
    """Return the id of the first question, in order of ids, whose rows differ in `values` (one value per row); None if
    there is no such question. -1 and NaN do not count as values."""
    import numpy as np

    questions = rows.text("doc_id")
    there = (values == values) & (values != -1) if values.dtype.kind == "f" else values >= 0
    codes, known = questions.codes[there], values[there]
    first = np.zeros(len(questions.names), dtype=known.dtype)
    first[codes[::-1]] = known[::-1]
    torn = np.unique(codes[known != first[codes]])
    return min((questions.names[code] for code in torn), default=None)


def run_at(rows: Rows, place: int) -> str:
    """Return the name of the run that a row comes from. place: the number of the row, from 0."""
    runs = rows.text(RUN)
    return runs.names[runs.codes[place]]


def _one_sample_twice(rows: Rows) -> tuple[int, int] | None:
    """Return the places of the first two rows that belong to one sample of one cell; None if there are none. An old row
    that lacks a new option of its method belongs to the cell with the option's default (`labels_of`)."""
    import numpy as np

    known = [rows.text("doc_id").codes, rows.text("method").codes, labels_of(rows).codes]
    known += [np.nan_to_num(rows.number(name), nan=-1.0) for name in NAMED_BY]
    sample = np.zeros(len(rows), dtype=np.int64)
    for values in known:
        _, codes = np.unique(values, return_inverse=True)
        _, sample = np.unique(sample * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    order = np.argsort(sample, kind="stable")
    again = np.flatnonzero(np.diff(sample[order]) == 0)
    pairs = ((int(order[i]), int(order[i + 1])) for i in again)
    return min(pairs, default=None)
