"""Measures how long the answers of a cell are, and which share of them was cut off.

    lengths(rows).median       # tokens

Truncated answers were cut off by the limit of new tokens. If eviction makes the model ramble, answers get longer before
scores fall.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.report.cells import answered, mean, present
from kvbench.report.rows import Rows


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one cell's answers in tokens, and the shares of answers that are truncated or have no extracted
    answer. Without answers, all figures except the number of answers are NaN."""

    answers: int
    mean: float
    low: float  # 10th percentile
    median: float
    high: float  # 90th percentile
    most: float
    truncated: float
    no_answer: float


def lengths(rows: Rows) -> Lengths:
    import numpy as np

    answers = answered(rows)
    tokens = present(answers.number("output_tokens"))
    low, median, high, most = np.percentile(tokens, (10, 50, 90, 100)).tolist() if len(tokens) else [math.nan] * 4
    return Lengths(
        answers=len(answers),
        mean=mean(tokens),
        low=low,
        median=median,
        high=high,
        most=most,
        truncated=mean(answers.text("stop_reason").is_one_of("length")),
        no_answer=mean(answers.number("no_answer")),
    )
