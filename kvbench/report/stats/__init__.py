"""Statistics of scores: means with error bars, paired comparisons, pass@k, majority votes, families of tests.

Scores are one list per question. The list holds the score of each sample: 0, 1 or a share. The order of the
questions does not matter, but all arguments of a call must have the same order:

    estimate([[1, 0, 1], [0, 0, 0]])                 # pass@1: mean of question means, two standard errors, interval
    one = paired(evicted, full_cache, seed=0)        # same questions: difference, paired t test, sign flips
    judge([one, other])                              # verdicts, Holm-adjusted p-values, smallest drops
    regression(yesterday, today)                     # one-sided: is today worse, and by how much at most
    mean_pass_at_k(scores, 8); maj_at_n(answers, scores)

Every mean is over questions, never over all samples, because samples of a question are not independent. In an example
with 30 questions of 32 samples each, the pooled standard error is 0.016, and the right one is 0.066.

Sources: Miller 2024, "Adding error bars to evals" (clustering); Bell and McCaffrey 2002 (few and unequal clusters);
Chen et al. 2021 (pass@k); Wilson 1927; Holm 1979. The functions are short and use numpy and scipy, which are imported
when a function first needs them. Undefined numbers (one question, one sample) are NaN, but an undefined p is 1.
"""

from kvbench.report.stats.clusters import Clusters
from kvbench.report.stats.compare import Paired, paired
from kvbench.report.stats.flips import fewest_clusters, sign_flip
from kvbench.report.stats.means import Estimate, estimate
from kvbench.report.stats.power import smallest_drop
from kvbench.report.stats.regression import Regression, both, regression
from kvbench.report.stats.samples import maj_at_n, mean_pass_at_k, pass_at_k, question_means
from kvbench.report.stats.verdicts import ALPHA, Judged, holm, judge

__all__ = [
    "ALPHA",
    "Clusters",
    "Estimate",
    "Judged",
    "Paired",
    "Regression",
    "both",
    "estimate",
    "fewest_clusters",
    "holm",
    "judge",
    "maj_at_n",
    "mean_pass_at_k",
    "paired",
    "pass_at_k",
    "question_means",
    "regression",
    "sign_flip",
    "smallest_drop",
]
