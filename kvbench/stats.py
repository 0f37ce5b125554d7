"""From scores to statements: means with error bars, paired comparisons, pass@k, majority votes, families of tests.

Scores come as one sequence per question (its samples, 0/1 or a share), questions in any fixed order:

    estimate([[1, 0, 1], [0, 0, 0]])                 # pass@1: mean of question means, two standard errors, interval
    paired(full_cache, evicted, seed=0)              # same questions: difference, paired t, sign flips, smallest drop
    mean_pass_at_k(scores, 8); maj_at_n(answers, scores); holm([0.01, 0.04])

Every mean is over questions, never over all samples: samples of a question are not independent, and in a 30 x 32
example the pooled standard error is 0.016 where the right one is 0.066. Two standard errors answer two questions:
`se` (would other questions of this kind give this number?) and `se_fixed` (would a re-run on these questions?).

Sources: Miller 2024, "Adding error bars to evals" (clustering); Chen et al. 2021 (pass@k); Wilson 1927; Holm 1979.
The parts are a few lines each over numpy and scipy, which are imported when a function first needs them. Numbers that
cannot be had (one question, one sample) are NaN.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Scores = Sequence[Sequence[float]]  # one inner sequence per question

FEW_QUESTIONS = 40  # up to here, and near 0 or 1, the normal interval is too narrow or leaves [0, 1]
NEAR_EDGE = 0.1
SIGNS_AT_ONCE = 2**16  # fit the processor's cache
ROUNDING = 1e-12  # standard errors and differences below this share of the scores are zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over questions with its uncertainty.

    `rule` says how the interval was made: "t", "wilson" (on the effective number of questions), "rule of three" (all
    0 or all 1: the standard error is 0 and says nothing), "constant" or "one question".
    """

    mean: float
    se: float  # new questions of this kind
    se_fixed: float  # the same questions, new samples
    low: float
    high: float
    rule: str
    questions: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A against B over the same questions. `diff` is mean A - mean B; `p` is two-sided, `p_drop` says B is worse."""

    diff: float
    se: float
    low: float
    high: float
    t: float
    df: int
    p: float
    p_drop: float
    p_sign_flip: float  # two-sided
    smallest_drop: float  # found with 80% power by the one-sided test at 5%
    mean_a: float
    mean_b: float
    questions: int


# --- one method -------------------------------------------------------------------------------------------------------


def question_means(scores: Scores) -> Floats:
    """Mean score of each question. A question without any sample is an error: it would silently change the mean."""
    import numpy as np

    means = np.empty(len(scores))
    for places, samples in _by_length(scores):
        if samples.shape[1] == 0:
            raise ValueError("a question has no samples")
        means[places] = samples.mean(axis=1)
    return means


def _by_length(scores: Scores) -> Iterator[tuple[list[int], Floats]]:
    """Questions with equally many samples together: their places, and their scores as [questions, samples]."""
    import numpy as np

    places: dict[int, list[int]] = {}
    for place, question in enumerate(scores):
        places.setdefault(len(question), []).append(place)
    for found in places.values():
        yield found, np.array([scores[place] for place in found], dtype=float)


def estimate(scores: Scores, *, clusters: Sequence[object] | None = None, level: float = 0.95) -> Estimate:
    """Mean of question means (pass@1) with error bars. `clusters` groups questions that share a source."""
    means = question_means(scores)
    count = len(means)
    mean = float(means.mean()) if count else math.nan
    groups, se = _clustered_se(means, clusters)
    se_fixed = _fixed_se(scores)
    low, high, rule = _interval(means, mean, se, groups, level)
    samples = sum(len(question) for question in scores)
    return Estimate(
        mean=mean, se=se, se_fixed=se_fixed, low=low, high=high, rule=rule, questions=count, samples=samples
    )


def _clustered_se(values: Floats, clusters: Sequence[object] | None) -> tuple[int, float]:
    """Number of clusters and the standard error of the mean: sqrt(C/(C-1) sum_c (sum of deviations in c)^2) / Q."""
    import numpy as np

    deviations = _cluster_sums(values - values.mean(), clusters) if len(values) else values
    count = len(deviations)
    if count < 2:
        return count, math.nan
    return count, float(np.sqrt(count / (count - 1) * np.sum(deviations**2)) / len(values))


def _cluster_sums(values: Floats, clusters: Sequence[object] | None) -> Floats:
    import numpy as np

    if clusters is None:
        return values
    if len(clusters) != len(values):
        raise ValueError(f"{len(clusters)} cluster names for {len(values)} questions")
    index: dict[object, int] = {}
    places = [index.setdefault(name, len(index)) for name in clusters]
    return np.bincount(places, weights=values, minlength=len(index)).astype(float)


def _fixed_se(scores: Scores) -> float:
    """sqrt(sum of s_q^2 / n_q) / Q: sampling noise alone. For 0/1 scores s_q^2 / n_q is p(1-p)/(n-1)."""
    import numpy as np

    if len(scores) == 0 or min(len(question) for question in scores) < 2:
        return math.nan
    noise = np.empty(len(scores))
    for places, samples in _by_length(scores):
        noise[places] = samples.var(axis=1, ddof=1) / samples.shape[1]
    return float(np.sqrt(sum(noise.tolist())) / len(scores))


def _interval(means: Floats, mean: float, se: float, groups: int, level: float) -> tuple[float, float, str]:
    from scipy.stats import t as student

    if groups < 2:
        return math.nan, math.nan, "one question"
    share = bool((means >= 0).all() and (means <= 1).all())
    if share and mean in (0.0, 1.0):
        bound = min(1.0, -math.log(1 - level) / groups)  # (1 - bound)^groups = 1 - level; 3 / Q at 95%
        return (0.0, bound, "rule of three") if mean == 0 else (1 - bound, 1.0, "rule of three")
    if se == 0:
        return mean, mean, "constant"
    quantile = float(student.ppf(0.5 + level / 2, groups - 1))
    if share and (groups <= FEW_QUESTIONS or not NEAR_EDGE <= mean <= 1 - NEAR_EDGE):
        return *_wilson(mean, mean * (1 - mean) / se**2, quantile), "wilson"
    low, high = mean - quantile * se, mean + quantile * se
    return (max(0.0, low), min(1.0, high), "t") if share else (low, high, "t")


def _wilson(mean: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's interval for a share seen in `n` independent trials; `n` may be a fraction."""
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k), unbiased."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n, not n={n}, correct={correct}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def mean_pass_at_k(scores: Scores, k: int) -> float:
    """pass@k averaged over questions. A sample counts as right when its score is 1."""
    return sum(pass_at_k(len(q), sum(s == 1 for s in q), k) for q in scores) / len(scores)


def maj_at_n(
    answers: Sequence[Sequence[str | None]], scores: Scores, *, same: Callable[[str], str] = str.strip
) -> float:
    """Score of each question's most frequent answer, ties to the one that came first; without any answer 0.

    `same` maps an answer to its spelling for the vote (`kvbench.scoring.math.normalise_answer` for mathematics).
    """
    total = 0.0
    for said, right in zip(answers, scores, strict=True):
        first: dict[str, float] = {}
        votes: Counter[str] = Counter()
        for answer, score in zip(said, right, strict=True):
            if answer is not None and answer.strip():
                votes[same(answer)] += 1
                first.setdefault(same(answer), score)
        if votes:
            total += first[max(votes, key=votes.__getitem__)]  # max returns the first of equals
    return total / len(scores)


def rates(stop_reasons: Sequence[str], no_answer: Sequence[float | bool]) -> dict[str, float]:
    """Shares of samples that hit the token limit and that gave no answer. NaN without samples."""

    def share(flags: Sequence[Any]) -> float:
        return sum(map(bool, flags)) / len(flags) if flags else math.nan

    return {"truncated": share([reason == "length" for reason in stop_reasons]), "no_answer": share(list(no_answer))}


# --- two methods ------------------------------------------------------------------------------------------------------


def paired(
    a: Scores,
    b: Scores,
    *,
    clusters: Sequence[object] | None = None,
    level: float = 0.95,
    permutations: int = 10_000,
    seed: int = 0,
) -> Paired:
    """Compare A and B question by question. The alarm is the paired t test; sign flips stand beside it.

    Question i of `a` and of `b` must be the same question. Identical tables give p = 1. Where all differences are
    equal, t says nothing; `p` and `p_drop` are then the exact ones of the sign flips.
    """
    from scipy.stats import t as student

    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} questions cannot be paired")
    means_a, means_b = question_means(a), question_means(b)
    diffs = means_a - means_b
    diff = float(diffs.mean()) if len(diffs) else math.nan
    groups, se = _clustered_se(diffs, clusters)
    df = max(groups - 1, 0)
    tiny = ROUNDING * max((abs(float(x)) for x in (*means_a, *means_b)), default=0.0)
    if groups >= 2 and se <= tiny:
        se, diff = 0.0, 0.0 if abs(diff) <= tiny else diff
    if groups < 2:
        t, p, p_drop, low, high = math.nan, 1.0, 1.0, math.nan, math.nan
    elif se == 0:
        t = math.copysign(math.inf, diff) if diff else 0.0
        p, p_drop = (2.0 ** (1 - groups), 2.0**-groups if diff > 0 else 1.0) if diff else (1.0, 1.0)
        low = high = diff
    else:
        t = diff / se
        p, p_drop = float(2 * student.sf(abs(t), df)), float(student.sf(t, df))
        half = float(student.ppf(0.5 + level / 2, df)) * se
        low, high = diff - half, diff + half
    return Paired(
        diff=diff,
        se=se,
        low=low,
        high=high,
        t=t,
        df=df,
        p=p,
        p_drop=p_drop,
        p_sign_flip=sign_flip(_cluster_sums(diffs, clusters), permutations=permutations, seed=seed),
        smallest_drop=smallest_drop(se, df),
        mean_a=float(means_a.mean()) if len(diffs) else math.nan,
        mean_b=float(means_b.mean()) if len(diffs) else math.nan,
        questions=len(diffs),
    )


def sign_flip(diffs: Sequence[float] | Floats, *, permutations: int = 10_000, seed: int = 0) -> float:
    """Two-sided p: how often random signs make the sum of differences at least this large. Exact for few questions."""
    import numpy as np

    values = np.asarray(diffs, dtype=float)
    values = values[values != 0]  # a zero has no sign
    if len(values) == 0:
        return 1.0
    bar = abs(values.sum()) * (1 - 1e-12) - 1e-12  # sums that differ by rounding only are equal
    if 2 ** len(values) <= permutations:
        every = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        return float(np.mean(np.abs(every @ values) >= bar))
    generator = np.random.default_rng(seed)
    hits = 0
    rows = max(1, SIGNS_AT_ONCE // len(values))
    for start in range(0, permutations, rows):
        block = min(rows, permutations - start)
        signs = 1.0 - 2.0 * generator.integers(0, 2, size=(block, len(values)))
        hits += int(np.sum(np.abs(signs @ values) >= bar))
    return (hits + 1) / (permutations + 1)


def smallest_drop(se: float, df: int, *, power: float = 0.8, alpha: float = 0.05, sides: int = 1) -> float:
    """The true drop that a t test with this standard error finds with the given power. NaN without spread."""
    return _shift(df, power, alpha / sides) * se if df >= 1 and se > 0 else math.nan


@cache
def _shift(df: int, power: float, alpha: float) -> float:
    """The smallest drop in standard errors. Cells of a table have the same few degrees of freedom."""
    from scipy.optimize import brentq
    from scipy.stats import nct
    from scipy.stats import t as student

    critical = float(student.ppf(1 - alpha, df))
    return float(brentq(lambda shift: nct.sf(critical, df, shift) - power, 0.0, 10 * critical + 10))


# --- families ---------------------------------------------------------------------------------------------------------


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: reject those at or below alpha."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def by_question(rows: Sequence[Mapping[str, Any]], column: str = "score") -> dict[str, list[float]]:
    """Scores of each doc_id in order of appearance; rows without a score are left out."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        value = row[column]
        if value is not None and value == value:
            groups.setdefault(str(row["doc_id"]), []).append(float(value))
    return groups
