"""Computes how many questions and samples a comparison needs to show "no worse than M". The variances come from a base
run.

Let v_q be the variance of the scores of question q's samples in base. Between two runs without a true difference, the
difference of question q then has the variance 2 v_q / k with k samples. The lower bound of the mean difference is above
-M with 80% power if M is at least the sum of two parts (`_reach`): the smallest true drop that the t test finds with
80% power (`smallest_drop`), and the distance by which the comparison's bound lies below the bound of the t test. The
drop is computed from v / k, where v is the mean of 2 v_q over the questions with several samples. Near 0 and 1 few
questions change between two runs. The differences then have a large kurtosis, which adds to both parts.

All this holds if the two runs draw their answers with independent noise. If both runs sample with the same noise, their
answers to a question are correlated, and fewer questions suffice. Two cases have rules of their own: one sample per
question (see `_noise`), and scores that never vary (see `needed`).

The comparison takes its variance and its degrees of freedom from clusters, which are questions of one source. The plan
does the same: if deviations in a cluster add up, v is larger than the mean of 2 v_q (see `_noise`), and the degrees of
freedom of t count clusters. The plan assumes that further questions come in clusters of the same sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from kvbench.compare.cell import Cell, Side
from kvbench.compare.policy import Policy
from kvbench.compare.words import few, named
from kvbench.report.stats import ALPHA, Clusters, fewest_clusters
from kvbench.report.stats.power import POWER, smallest_drop

SAMPLES = (1, 4, 8, 16, 32, 64)
FEWEST = fewest_clusters(2 * ALPHA)
MOST_QUESTIONS = 1_000_000
MOST_SAMPLES = 100_000  # per question
NORMAL = NormalDist().inv_cdf(1 - ALPHA)
SKEWED = 1.5  # standard errors by which skewness lowers the bound of n clusters, times n / kurtosis (simulated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one cell needs to show "no worse than the margin".

    questions: how many questions the cell has. needed: for each number of samples per question, how many questions the
    cell needs. independent: the same if no two questions shared a source. samples: how many samples per question the
    cell needs with the questions that it has; None if no number of samples suffices, because the cell has too few
    questions or clusters.
    """

    cell: str  # told apart from the other cells of the run
    model: str
    interval: int | None
    seed: str
    margin: float
    questions: int
    variance: float  # variance of the difference between two runs' scores of one sample
    needed: dict[int, int]
    independent: dict[int, int]
    samples: int | None
    source: str  # of `variance`: "samples", "mean score" (one sample per question: an upper limit) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """The noise of a question's samples, averaged over questions.

    alone: the variance between the samples of a question. clustered: the same, or more if the deviations of a cluster's
    questions add up. squared: the square of a question's variance. fourth: the fourth power of a sample's deviation
    from its question's mean. size: the size of a question's cluster (`Clusters.mean_size`). source: see `Plan.source`.
    differing: for each question, how often two of its samples have different scores.
    """

    alone: float
    clustered: float
    squared: float
    fourth: float
    size: float
    source: str
    differing: tuple[float, ...]

    def kurtosis(self, samples: int) -> float:
        """Return the kurtosis of the questions' differences between two runs with this many samples per question: the
        mean of their fourth powers divided by the squared mean of their squares."""
        mean = (self.fourth + 3 * (samples - 1) * self.squared) / samples**3  # of the deviation of a question's mean
        return (2 * mean + 6 * self.squared / samples**2) / (2 * self.alone / samples) ** 2 if self.alone else 0.0

    def changed(self, samples: int) -> float:
        """Return a lower limit of the share of questions whose mean score differs between two runs with this many
        samples per question. It never falls as the number of samples grows.

        Rises and falls of samples are counted as two Poisson variables of equal means; the mean score of a question
        stays if both counts are equal.
        """
        import numpy as np
        from scipy.special import ive

        return float(1 - ive(0, samples * np.array(self.differing)).mean())

    def needed(self, margin: float, samples: int) -> int:
        variance, kurtosis = 2 * self.clustered / samples, self.kurtosis(samples)
        return needed(variance, margin, self.size, kurtosis, 1 / samples, self.changed(samples))


def plans(side: Side, policy: Policy) -> Iterator[Plan]:
    for key in sorted(side.cells, key=lambda key: key.order()):
        cell, margin = side.cells[key], policy.margin_of(key)
        noise = _noise(cell)
        if not margin > 0 or noise is None:
            continue
        there, variance = len(cell.questions), 2 * noise.clustered
        yield Plan(
            cell=named(key, side.cells),
            model=key.model,
            interval=key.interval,
            seed=key.seed,
            margin=margin,
            questions=there,
            variance=variance,
            needed={k: noise.needed(margin, k) for k in SAMPLES},
            independent={k: replace(noise, clustered=noise.alone, size=1.0).needed(margin, k) for k in SAMPLES},
            samples=_samples(noise, margin, there),
            source=noise.source if variance else "none",
        )


def needed(variance: float, margin: float, size: float, kurtosis: float, step: float, changed: float) -> int:
    """Return how many questions are needed to show "no worse than the margin" with 80% power; at least 5 clusters.

    variance, kurtosis: of a question's difference between two runs. size: how many questions a cluster has. step: by
    how much one sample changes the mean score of its question. changed: the share of questions whose mean score differs
    between two runs. If the variance is 0, no score varies. The result is then the number of questions whose unchanged
    scores suffice to show that scores fall on at most the share `margin` of all questions. A result above
    `MOST_QUESTIONS` means only that more than `MOST_QUESTIONS` are needed.
    """
    unchanged = -math.log(ALPHA) / margin * size
    if variance == 0:  # no score varies: bound the share of all questions that may differ
        return math.ceil(max(FEWEST * size, unchanged))
    # With fewer questions than `likely`, no score differs in more than 10% of comparisons (half of the 20% that may
    # fail), and these comparisons need `unchanged` questions.
    likely = -math.log((1 - POWER) / 2) / changed * size
    fewest = math.ceil(max(FEWEST * size, min(unchanged, likely)))
    # The margin that n questions show falls as n grows. If no count suffices, the result is above MOST_QUESTIONS.
    counts = range(fewest, MOST_QUESTIONS + 1)
    return fewest + bisect_left(counts, True, key=lambda n: _reach(n, variance, size, kurtosis, step) <= margin)


def _samples(noise: _Noise, margin: float, questions: int) -> int | None:
    """Return the smallest number of samples with which the questions suffice. It is found by bisection, because the
    number of questions that are needed never rises with the number of samples."""
    counts = range(1, MOST_SAMPLES + 1)
    found = 1 + bisect_left(counts, True, key=lambda samples: noise.needed(margin, samples) <= questions)
    return found if found <= MOST_SAMPLES else None


def _reach(questions: int, variance: float, size: float, kurtosis: float, step: float) -> float:
    """Return the smallest margin M for which a comparison of two runs without a true difference shows "no worse than
    M" with 80% power. For the arguments see `needed`.

    If few of n clusters changed, the mean difference depends on only about n / kurtosis questions, and its standard
    error varies more than for normal data. In tables whose scores fell by chance, the comparison's bound lies below the
    bound of t for two reasons: it allows for a fall of one sample in one more cluster, and it is corrected for the
    skewness that chance gives to the differences.

    The fall is Gaffke's (`_free_low` in `kvbench.report.stats.regression`): the weight of one more cluster is
    exponentially distributed with the mean 1 / n. The quantile of the sum of this weight and the mean's normal noise is
    approximated by Cornish and Fisher's formula.
    """
    clusters, se = questions / size, math.sqrt(variance / questions)
    tail = max(0.0, kurtosis - 3) / (4 * clusters)  # as in `tail_of`
    drop = smallest_drop(se, clusters - 1, alpha=2 * ALPHA, tail=tail)
    fall = step / clusters
    both = math.hypot(se, fall)
    free = NORMAL * (both - se) + (NORMAL**2 - 1) / 3 * fall**3 / both**2
    return drop + fall + max(free, SKEWED * kurtosis / clusters * se)


def _noise(cell: Cell) -> _Noise | None:
    """Return the noise of a cell's scores; None if the cell has no scores.

    The variance between the samples of a question is averaged over the questions with several samples. For `clustered`,
    deviations from the questions' means are first summed over a cluster, sample by sample. The variance of these sums
    is that of comparisons between the samples of base, as if each sample number were a run. By chance it may be too
    small, so it is used only if it is larger than `alone`.

    If every question has one sample, the variance is unknown. Its upper limit p (1 - p), where p is the mean score,
    takes its place. For `clustered`, the variance from the scores' standard error with clusters (`_variance`) takes its
    place instead if it is larger than this limit.
    """
    means, sources, variances, fourths, differing = [], [], [], [], []
    sums: dict[tuple[str, int], float] = defaultdict(float)  # by cluster and sample
    for question in cell.questions.values():
        scores = {sample: score for sample, score in enumerate(question.scores) if score is not None}
        if not scores:
            continue
        least, most = min(scores.values()), max(scores.values())
        mean = min(max(math.fsum(scores.values()) / len(scores), least), most)  # rounding adds no spread
        means.append(mean)
        sources.append(question.cluster)
        if (others := len(scores) - 1) > 0:
            variances.append(math.fsum((score - mean) ** 2 for score in scores.values()) / others)
            fourths.append(math.fsum((score - mean) ** 4 for score in scores.values()) / others)
            equal = sum(count * (count - 1) for count in Counter(scores.values()).values())
            differing.append(1 - equal / (len(scores) * others))
            for sample, score in scores.items():
                sums[question.cluster, sample] += (score - mean) / math.sqrt(others)
    if not means:
        return None
    groups = Clusters.make(sources, len(sources))
    source = "samples" if variances else "mean score"
    if variances:
        alone = math.fsum(variances) / len(variances)
        together = math.fsum(value**2 for value in sums.values()) / len(variances)
    else:
        whole = math.fsum(means) / len(means)
        alone = whole * (1 - whole)
        variances, fourths, differing = [alone], [alone * (1 - 3 * alone)], [2 * alone]
        together = _variance(means, groups)
    return _Noise(
        alone=alone,
        clustered=max(alone, together) if groups.count < len(means) else alone,
        squared=math.fsum(variance**2 for variance in variances) / len(variances),
        fourth=math.fsum(fourths) / len(fourths),
        size=groups.mean_size,
        source=source,
        differing=tuple(differing),
    )


def _variance(means: list[float], groups: Clusters) -> float:
    """Return the variance per question that gives the mean its standard error with clusters; 0 with one cluster."""
    import numpy as np

    return groups.standard_error(np.array(means)) ** 2 * len(means) if groups.count > 1 else 0.0


def notes(found: list[Plan]) -> list[str]:
    """Return at most three notes: on the cells whose samples show no variance, on the cells with one sample per
    question, and on the cells that need more questions because questions share a source. The first two say on what
    assumption the numbers for their cells rest."""
    flat, single = ([plan.cell for plan in found if plan.source == source] for source in ("none", "mean score"))
    shared = [plan.cell for plan in found if plan.needed != plan.independent]
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
            "mean score p allows, p (1 - p), and are upper limits. Where questions share a source, they assume the "
            "spread between sources if it is larger, and are no upper limits."
        )
    if shared:
        pairs = ((plan.needed[k], plan.independent[k]) for plan in found for k in SAMPLES)
        clustered, alone = max(pairs, key=lambda pair: pair[0] / pair[1])
        lines.append(
            f"Clusters: {few(shared)}. Questions of one source say less than independent questions, so more are needed "
            f"there, up to {_count(clustered)} in place of {_count(alone)}. The numbers assume that further questions "
            "come in clusters of the same sizes."
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
