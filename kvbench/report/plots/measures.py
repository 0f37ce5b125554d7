"""The measures that a report's figures show against the budget: scores, speed, lengths of answers, truncation."""

from kvbench.report.plots.budgets import Measure

SCORE = Measure(
    name="score",
    title="Score",
    axis="score",
    field="mean",
    low="low",
    high="high",
    shows="Mean score over questions",
    bands="bands and bars: 95% intervals over questions, as in the table",
    about_missing="without a score",
)
SPEED = Measure(
    name="speed",
    title="Speed",
    axis="decoded tokens per second",
    field="tokens_per_second",
    low="slower",
    high="faster",
    shows="Decoded tokens per second, evictions included,",
    bands="bands and bars: one standard deviation over batches to each side, not a confidence interval of the mean",
    more="Compare within one machine, under equal load.",
    together=False,
    about_missing="without times",
)
LENGTH = Measure(
    name="length",
    title="Answer length",
    axis="output tokens",
    field="output_tokens",
    low="output_tokens_q1",
    high="output_tokens_q3",
    shows="Mean output tokens of all answers, truncated answers included,",
    bands="bands and bars: the middle half of the answers",
    together=False,
    about_missing="without answers",
)
TRUNCATED = Measure(
    name="truncated",
    title="Truncated answers",
    axis="share of answers",
    field="truncated",
    shows="Share of answers that reached the limit of new tokens",
    bands="no error bars",
    form=".0%",
    about_missing="without answers",
)
