"""Computes a weighted mean over tasks, with its error, its confidence interval and its difference to a baseline.

    weighted_mean([(0.5, of_cell(walk)), (0.5, of_cell(chain))])

The error is sqrt(sum (w se)^2), where w is a task's weight and se its standard error. The weights sum to 1, and the
tasks are treated as independent. For the lower end of the weighted mean's interval, se in this formula is replaced by
the distance from a task's mean to the lower end of the task's own interval; the result is the distance from the
weighted mean to the lower end. The upper end is computed likewise (Zou and Donner 2008). If a task shows no spread, its
error is 0 and says nothing; tables then print the interval in place of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.report.blocks import Column, own, plain
from kvbench.report.cells import ScoreCell
from kvbench.report.stats import ALPHA, smallest_drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A weighted mean over tasks, and its difference to the baseline's mean, paired by question. `missing`: the tasks
    without a score; if there are any, all figures are NaN.

    `spread`: False if the error of the score is 0 for at least one task. `diff_spread`: False if the error of the
    difference is 0 for at least one task. `df`: the smallest number of degrees of freedom among the tasks' differences.
    """

    value: float = math.nan
    se: float = math.nan
    low: float = math.nan
    high: float = math.nan
    diff: float = math.nan
    diff_se: float = math.nan
    diff_low: float = math.nan
    diff_high: float = math.nan
    df: float = math.nan
    spread: bool = True
    diff_spread: bool = True
    missing: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return the figures for JSON, with None in place of NaN."""
        figures = own("se", "low", "high", "diff", "diff_se", "diff_low", "diff_high", "missing")
        (line,) = plain([Column("mean", "value"), *figures], [self])
        return line


def of_cell(cell: ScoreCell) -> Mean:
    """Return a cell's score as a mean over one task."""
    score = cell.score
    mean = Mean(value=score.mean, se=score.se, low=score.low, high=score.high, spread=score.se != 0)
    if cell.against is None:
        return mean
    paired = cell.against.paired
    return replace(
        mean,
        diff=paired.diff,
        diff_se=paired.se,
        diff_low=paired.low,
        diff_high=paired.high,
        df=paired.df,
        diff_spread=paired.se != 0,
    )


def weighted_mean(means: Sequence[tuple[float, Mean]]) -> Mean:
    """Return a weighted mean. means: pairs of a weight and a mean; the weights sum to 1."""

    def together(figure: Callable[[Mean], float]) -> float:
        """Return sqrt(sum (w f)^2) over the tasks, where w is a task's weight and f the figure of its mean."""
        return math.hypot(*(weight * figure(mean) for weight, mean in means))

    value, diff = (sum(weight * getattr(mean, name) for weight, mean in means) for name in ("value", "diff"))
    return Mean(
        value=value,
        se=together(lambda mean: mean.se),
        low=value - together(lambda mean: mean.value - mean.low),
        high=value + together(lambda mean: mean.high - mean.value),
        diff=diff,
        diff_se=together(lambda mean: mean.diff_se),
        diff_low=diff - together(lambda mean: mean.diff - mean.diff_low),
        diff_high=diff + together(lambda mean: mean.diff_high - mean.diff),
        df=min(mean.df for _, mean in means),
        spread=all(mean.spread for _, mean in means),
        diff_spread=all(mean.diff_spread for _, mean in means),
    )


def seen_drop(name: str, means: Sequence[Mean]) -> list[str]:
    """Return a list with one note: how large a true drop of an average must be for t tests to find it with 80% power.
    The list is empty if no comparison has a standard error above 0. name: the name of the average. means: this average
    of each method."""
    family = [mean for mean in means if not math.isnan(mean.diff)]
    alpha = ALPHA / max(1, len(family))
    drops = [smallest_drop(m.diff_se, m.df, alpha=alpha) for m in family if m.diff_spread]
    found = [drop for drop in drops if not math.isnan(drop)]
    if not found:
        return []
    number = "the comparison" if len(family) == 1 else f"{len(found)} of {len(family)} comparisons"
    level = f"{ALPHA:.0%}" + (f" after Holm over {len(family)}" if len(family) > 1 else "")
    return [f"A true drop of {name} by {max(found):.3f} is found with 80% power in {number} (two-sided t at {level})."]
