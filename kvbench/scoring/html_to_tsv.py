"""LongProc's score of a table extracted from a web page: F1 over whole rows (Ye et al. 2025).

Gives the same scores as `eval_html_to_tsv` and `html_to_tsv_evaluator.py` of princeton-pli/LongProc, but works on plain
rows instead of data frames. The first row is always the head. Cells are compared by position without case, ASCII
punctuation, articles and blanks. The order of the rows does not matter. A right row that is repeated counts as right
each time; so `row_dup_rate`, the share of repeated rows, is reported too. A table scores 0 with extraction rate 0 in
these cases:

- it cannot be parsed, or two of its columns have the same name;
- it has no row below the head;
- it has another number of columns than the reference.
"""

from __future__ import annotations

import csv
import re

from kvbench.scoring.words import plain_words

_FENCED = re.compile(r"```tsv([\s\S]*)```")  # greedy: up to the last fence
_OPEN = "```tsv"
_EMPTY = "N/A"  # fills every cell of a row with too few or too many cells

Row = tuple[str, ...]


def score_tsv(prediction: str, reference: str) -> dict[str, float]:
    """Return f1, precision, recall and extraction_rate of an output's table.

    precision: the share of the output's rows that are in the reference. recall: the share of the reference's rows that
    are in the output. extraction_rate: 1, except in the cases that the module's docstring lists: all four
    results are then 0.
    """
    rows, expected = _rows(_table(prediction)), _rows(reference)
    if not rows or not expected or len(rows[0]) != len(expected[0]):
        return dict.fromkeys(("f1", "precision", "recall", "extraction_rate"), 0.0)
    precision = _share(rows, expected)
    recall = _share(expected, rows)
    f1 = 2 * recall * precision / (recall + precision) if recall + precision else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "extraction_rate": 1.0}


def row_dup_rate(prediction: str) -> float:
    """Return the share of an output's table rows that repeat an earlier row; 0 if the output has no table."""
    rows = _rows(_table(prediction))
    return 1 - len(set(rows)) / len(rows) if rows else 0.0


def _table(prediction: str) -> str:
    """Return the text inside an output's ```tsv fence; without such a fence, the whole output. A fence that is not
    closed ends with the output."""
    if fenced := _FENCED.search(prediction):
        return fenced[1]
    return prediction.split(_OPEN)[1] if _OPEN in prediction else prediction


def _rows(table: str) -> list[Row]:
    """Return a table's rows below its head, with normalised cells; [] if the table cannot be parsed or has two
    columns with the same name.

    A last row with another number of cells than the head is dropped. Any earlier row with another number of cells than
    the head gets `_EMPTY` in every cell.
    """
    try:
        head, *rows = csv.reader(table.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):  # ValueError: no row at all
        return []
    if len(set(head)) < len(head):  # the official data frame fails on two columns with the same name
        return []
    if rows and len(rows[-1]) != len(head):  # the output was cut off, or prose follows the table
        rows.pop()
    full = (row if len(row) == len(head) else [_EMPTY] * len(head) for row in rows)
    return [tuple("".join(plain_words(cell)) for cell in row) for row in full]


def _share(rows: list[Row], among: list[Row]) -> float:
    there = set(among)
    return sum(row in there for row in rows) / len(rows)
