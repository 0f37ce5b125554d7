"""LongProc's score of a table extracted from a web page: F1 over whole rows (Ye et al. 2025).

    score_tsv("```tsv\\nname\\tprice\\nAlpha\\t1\\n```", reference)     # f1, precision, recall, extraction_rate

Equal to `eval_html_to_tsv` and `html_to_tsv_evaluator.py` of princeton-pli/LongProc, on plain rows instead of data
frames. The first row is always the head; cells are compared by position without case, ASCII punctuation, articles and
blanks; neither order nor repetition of rows counts. A table that cannot be read, or that has another number of columns
than the reference, scores 0 with extraction rate 0.
"""

from __future__ import annotations

import csv
import re
import string

_FENCED = re.compile(r"```tsv([\s\S]*)```")  # greedy: up to the last fence
_OPEN = "```tsv"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EMPTY = "N/A"  # fills every cell of a row with too few or too many

Row = tuple[str, ...]


def score_tsv(prediction: str, reference: str) -> dict[str, float]:
    """Score an output against the reference table.

    Returns f1, precision (rows of the output that are in the reference), recall and extraction_rate (1 where both are
    tables of equally many columns).
    """
    rows, expected = _rows(_table(prediction)), _rows(reference)
    if not rows or not expected or len(rows[0]) != len(expected[0]):
        return dict.fromkeys(("f1", "precision", "recall", "extraction_rate"), 0.0)
    precision = _share(rows, expected)
    recall = _share(expected, rows)
    f1 = 2 * recall * precision / (recall + precision) if recall + precision else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "extraction_rate": 1.0}


def row_dup_rate(prediction: str) -> float:
    """Share of the output's rows that repeat an earlier one, which precision ignores. 0 without a table."""
    rows = _rows(_table(prediction))
    return 1 - len(set(rows)) / len(rows) if rows else 0.0


def _table(prediction: str) -> str:
    """The output's table: between its fences, after an open fence, or all of the output."""
    if fenced := _FENCED.search(prediction):
        return fenced[1]
    return prediction.split(_OPEN)[1] if _OPEN in prediction else prediction


def _rows(table: str) -> list[Row]:
    """The normalised rows after the head; [] if the table cannot be read."""
    try:
        head, *rows = csv.reader(table.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):  # ValueError: no row at all
        return []
    if len(set(head)) < len(head):  # the official data frame fails on two columns of one name
        return []
    if rows and len(rows[-1]) != len(head):  # cut off, or prose after the table
        rows.pop()
    return [tuple(map(_plain, row if len(row) == len(head) else [_EMPTY] * len(head))) for row in rows]


def _plain(cell: str) -> str:
    return "".join(_ARTICLES.sub(" ", cell.lower().translate(_PUNCTUATION)).split())


def _share(rows: list[Row], among: list[Row]) -> float:
    there = set(among)
    return sum(row in there for row in rows) / len(rows)
