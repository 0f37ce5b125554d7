"""Computes how many questions and samples a comparison needs to show "no worse than M". The variances come from a base
run.

Let v_q be the variance of the scores of question q's samples in base. Between two runs without a true difference, the
difference of question q then has the variance 2 v_q / k with k samples. The lower bound of the mean difference is above
-M with 80% power if M >= (t_95 + t_80) sqrt(v / (k Q)). Q is the number of questions, and v is the mean of 2 v_q over
the questions with several samples; t_95 and t_80 are quantiles of Student's t. This holds if the two runs draw their
answers with independent noise. If both runs sample with the same noise, their answers to a question are correlated, and
fewer questions suffice. Two cases have rules of their own: one sample per question (see `_noise`), and scores that
never vary (see `needed`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.compare.cell import Cell, Side
from kvbench.compare.policy import Policy
from kvbench.compare.words import few
from kvbench.errors import bare
from kvbench.report.stats import ALPHA, fewest_clusters
from kvbench.report.stats.power import POWER

SAMPLES = (1, 4, 8, 16, 32, 64)
FEWEST = fewest_clusters(2 * ALPHA)
MOST_QUESTIONS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one cell needs to show "no worse than the margin".

    questions: how many questions the cell has. needed: for each number of samples per question, how many questions the
    cell needs. samples: how many samples per question the cell needs with the questions that it has; None if no number
    of samples suffices, because the cell has too few questions.
    """

    cell: str
    margin: float
    questions: int
    variance: float  # variance of the difference between two runs' scores of one sample
    needed: dict[int, int]
    samples: int | None
    source: str  # of `variance`: "samples", "mean score" (one sample per question: an upper limit) or "none"


def plans(side: Side, policy: Policy) -> Iterator[Plan]:
    for key in sorted(side.cells, key=lambda key: key.order()):
        cell, margin = side.cells[key], policy.margin_of(key)
        noise, source = _noise(cell)
        variance = 2 * noise
        if not margin > 0 or math.isnan(variance):
            continue
        there = len(cell.questions)
        yield Plan(
            cell=bare(key.cell),
            margin=margin,
            questions=there,
            variance=variance,
            needed={k: needed(variance / k, margin) for k in SAMPLES},
            samples=_samples(variance, margin, there),
            source=source if variance else "none",
        )


def needed(variance: float, margin: float) -> int:
    """Return how many questions are needed to show "no worse than the margin" with 80% power; at least 5.

    variance: the variance of a question's difference between two runs. If it is 0, no score varies. The result is then
    the number of questions whose unchanged scores suffice to show that scores fall on at most the share `margin` of all
    questions. A result above `MOST_QUESTIONS` means only that more than `MOST_QUESTIONS` are needed.
    """
    if variance == 0:  # no score varies: bound the share of all questions that may differ
        return max(FEWEST, math.ceil(-math.log(2 * ALPHA) / margin))
    # The margin that n questions show falls as n grows. If no count suffices, the result is MOST_QUESTIONS + 1.
    counts = range(FEWEST, MOST_QUESTIONS + 1)
    return FEWEST + bisect_left(counts, True, key=lambda n: _reach(n) * math.sqrt(variance / n) <= margin)


def _samples(variance: float, margin: float, questions: int) -> int | None:
    if questions < FEWEST or (variance == 0 and questions < needed(variance, margin)):
        return None
    return max(1, math.ceil(variance * (_reach(questions) / margin) ** 2 / questions))


def _reach(questions: int) -> float:
    """Return the smallest margin M for which a comparison of two runs without a true difference shows "no worse than
    M" with 80% power. M is in standard errors of the difference between the runs."""
    from scipy.special import stdtrit

    return float(stdtrit(questions - 1, 1 - ALPHA) + stdtrit(questions - 1, POWER))


def _noise(cell: Cell) -> tuple[float, str]:
    """Return the variance between the samples of a question, as a mean over questions, and the source of this number
    (see `Plan.source`).

    If every question has one sample, the variance is unknown; its upper limit p (1 - p), where p is the mean score,
    takes its place. The variance is NaN if the cell has no scores.
    """
    variances, means = [], []
    for question in cell.questions.values():
        scores = [score for score in question.scores if score is not None]
        if not scores:
            continue
        mean = math.fsum(scores) / len(scores)
        means.append(mean)
        if len(scores) > 1:
            variances.append(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    if variances:
        return math.fsum(variances) / len(variances), "samples"
    if not means:
        return math.nan, "none"
    whole = math.fsum(means) / len(means)
    return whole * (1 - whole), "mean score"


def notes(found: list[Plan]) -> list[str]:
    """Return at most two notes: one on the cells whose samples show no variance, and one on the cells with one sample
    per question. A note says on what assumption the numbers for its cells rest."""
    flat, single = ([plan.cell for plan in found if plan.source == source] for source in ("none", "mean score"))
    lines = []
    if flat:
        lines.append(
            f"No spread: {few(flat)}. All samples of a question have the same score there, so their variance says "
            "nothing. If no score changes on as many questions as stated, the share of all questions whose scores fall "
            "is shown to be at most the margin. More samples do not help."
        )
    if single:
        lines.append(
            f"One sample per question: {few(single)}. Their spread is unknown; the numbers assume the largest that the "
            "mean score p allows, p (1 - p), and are upper limits."
        )
    return lines


def _count(questions: int) -> str:
    return f"> {MOST_QUESTIONS:,}" if questions > MOST_QUESTIONS else f"{questions:,}"


def text(found: list[Plan]) -> str:
    """Return the plans as a table for a terminal."""
    from kvbench.console import terminal

    console = terminal.console()
    heads = [f"at {k}" for k in SAMPLES]
    table = terminal.grid(
        "cell", "margin", *heads, "samples for its own questions", right=("margin", *heads), whole=tuple(heads)
    )
    for plan in found:
        own = "no number suffices" if plan.samples is None else f"{plan.samples:,} for {plan.questions}"
        table.add_row(plan.cell, f"{plan.margin:g}", *(_count(plan.needed[k]) for k in SAMPLES), own)
    with console.capture() as captured:
        console.print("Number of questions needed, by samples per question, to show no worse than the margin")
        console.print("with 80% power if nothing changed; from the variances of this run.\n")
        console.print(table)
        for note in notes(found):
            console.print(f"\n{terminal.clean(note)}")
    return captured.get().rstrip("\n")
