"""Turns rows into cells: one method at one budget on one task, with its scores over questions, and its entries, bytes
and speed.

    for label, budget, part in cells_of(rows, shared):
        make_cell(label, budget, part, scores, clusters, progress)

All numbers come from the rows alone. Scores are means over questions, whatever the number of their samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvbench.errors import KVBenchError, SetupError, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget, label
from kvbench.report import stats
from kvbench.report.rows import Rows, Text, ranks
from kvbench.scoring.math import normalise_answer

PASS_AT = (1, 2, 4, 8, 16, 32)
NO_BUDGET = -1  # sorts methods without a budget first
FULL = "full"  # the method that never evicts
SCORES = {"score": "score", "score_partial": "partial", "score_strict": "strict"}
UNBOUNDED = (
    "* generated entries are not bounded by the budget (most such methods evict the prompt only). Compare by bytes."
)


@dataclass(frozen=True, slots=True)
class Against:
    """The comparison of a cell with the baseline's cell on the questions that both have."""

    baseline: str
    paired: stats.Paired
    judged: stats.Judged


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCell:
    """One method at one budget on one task. Numbers missing from the rows are NaN."""

    method: str  # with the options that differ from the defaults
    budget: Budget | None  # a number of entries, or a share of the prompt if the user gave a share
    decode_bounded: bool
    evicts: bool
    score: stats.Estimate
    others: dict[str, float]  # mean over questions of each score column
    floor: float
    pass_at: dict[int, float]  # pass@k by k, see `_pass_at`; empty if a question has one sample only
    maj: float  # mean score of the questions' most frequent answers; NaN with one sample or without answers to vote for
    samples: int  # number of samples that neither failed nor wait for a score
    failed: int
    unscored: int  # answers that wait for a score
    truncated: float  # share of answers, scored or not
    no_answer: float  # share of scored answers
    entries_after_evict: float  # per layer and KV head, maximum over samples
    entries_peak: float  # per layer and KV head, maximum over samples
    entries_mean: float  # per layer and KV head, mean over samples
    kv_bytes_peak: float  # of one sequence, mean over samples
    kv_bytes_mean: float
    tokens_per_second: float
    tokens_per_second_sd: float  # over batches
    machine_load: float  # per core, mean over samples; NaN: not recorded
    roofline_share: float
    evict_share: float  # share of the seconds of decoding and evicting that evicting took
    progress: str  # "3 of 16 rows" if an unfinished run lacks rows of this cell; otherwise empty
    against: Against | None = None
    # Score, bytes and speed divided by those of the full cache on the questions that both cells have, and the standard
    # deviation over batches of the ratio of speeds. Empty if the full cache was not run.
    of_full: Mapping[str, float] = field(default_factory=dict)

    @property
    def marked(self) -> bool:
        """Whether generated entries are not bounded by the budget; tables mark such cells with an asterisk."""
        return self.evicts and not self.decode_bounded

    @property
    def baseline(self) -> str:
        return self.against.baseline if self.against else ""


def method_label(method: str, options: Any, shared: Mapping[str, Any] | None = None) -> str:
    """Return the method with those options that differ from its defaults: ``gkv``, ``snapkv-decode(variant=gkv)``.

    If the method is not installed here, its defaults are unknown. Then the label leaves out all options in `shared`,
    which have the same value in all rows of the method. options: the method's options as JSON text.
    """
    given = options_of(options) if isinstance(options, str) and options else {}
    try:
        default = choose.make(method, {}).options()
    except KVBenchError:
        default = dict(shared or {})
    differing = [f"{k}={v}" for k, v in sorted(given.items()) if k not in default or default[k] != v]
    return f"{method}({', '.join(differing)})" if differing else method


def options_of(text: str) -> dict[str, Any]:
    """Return a method's options from their JSON text. Raises SetupError if the text is not a JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise SetupError(
            f"rows.parquet is damaged: its column options holds {quote(text)}, which is not a JSON object. "
            "'kvbench repair RUN' makes the table again from the run's journal."
        )
    return options


def cells_of(rows: Rows, shared: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Budget | None, Rows]]:
    """Yield (label, budget, rows) of each cell, in the order of tables: by budget, then by method. shared: for each
    method the options that have one value in all its rows."""
    import numpy as np

    share = np.nan_to_num(rows.number("budget_share"), nan=NO_BUDGET)
    size = np.where(share == NO_BUDGET, np.nan_to_num(rows.number("budget"), nan=NO_BUDGET), NO_BUDGET)
    shares, share_at = np.unique(share, return_inverse=True)
    sizes, size_at = np.unique(size, return_inverse=True)
    methods, labels = rows.text("method"), labels_of(rows, shared)
    order = sorted(labels.names)
    for (s, n, _, place), part in rows.parts(
        share_at, size_at, ranks(methods.names)[methods.codes], ranks(labels.names)[labels.codes]
    ):
        budget = float(shares[s]) if shares[s] != NO_BUDGET else int(sizes[n]) if sizes[n] != NO_BUDGET else None
        yield order[place], budget, part


def decode_bounded(rows: Rows) -> bool:
    """Return whether the budget also bounds the generated entries of a cell's rows."""
    bounded = present(rows.number("decode_bounded"))
    return bool(bounded.all()) if len(bounded) else True


def evicts(rows: Rows) -> bool:
    """Return whether the method of a cell's rows evicts: rows of the full cache have no interval."""
    return bool(len(present(rows.number("interval"))))


def idle_note(cells: Iterable[str]) -> list[str]:
    """Return a list with one note that names the cells in which nothing was evicted; an empty list if `cells` is empty.
    cells: the names of these cells."""
    names = ", ".join(cells)
    return [f"These cells evicted nothing, so their answers are the full cache's: {names}."] if names else []


def make_cell(
    method: str,
    budget: Budget | None,
    rows: Rows,
    by_question: dict[str, list[float]],
    clusters: Mapping[str, str],
    progress: str,
    *,
    votes: bool = True,
) -> ScoreCell:
    """Return the cell of these rows.

    by_question: the samples' scores by question. clusters: the cluster of each question. progress: see `ScoreCell`.
    votes: whether the samples of a question can vote for an answer. They can if answers are texts that several samples
    may share; they cannot if answers are programs or if a judge rates them.
    """
    status = rows.text("status")
    ok, unscored = rows.where(status.is_one_of("ok")), int(status.is_one_of("unscored").sum())
    answers = answered(rows)
    busy = _busy(answers)
    return ScoreCell(
        method=method,
        budget=budget,
        decode_bounded=decode_bounded(rows),
        evicts=evicts(rows),
        score=estimate(by_question, clusters),
        others={column: question_mean(rows.scores(column)) for column in SCORES},
        floor=mean(ok.number("floor")),
        pass_at=_pass_at(ok),
        maj=_majority(ok) if votes else math.nan,
        samples=len(ok),
        failed=len(rows) - len(ok) - unscored,
        unscored=unscored,
        truncated=mean(answers.text("stop_reason").is_one_of("length")),
        no_answer=mean(ok.number("no_answer")),
        entries_after_evict=most(answers.number("entries_after_evict")),
        entries_peak=most(answers.number("entries_peak")),
        entries_mean=mean(answers.number("entries_mean")),
        kv_bytes_peak=mean(answers.number("kv_bytes_peak")),
        kv_bytes_mean=mean(answers.number("kv_bytes_mean")),
        tokens_per_second=speed(answers),
        tokens_per_second_sd=speed_sd(answers),
        machine_load=mean(answers.number("machine_load")),
        roofline_share=mean(answers.number("roofline_share")),
        evict_share=float(_seconds(answers, "evict_seconds").sum() / busy) if busy > 0 else math.nan,
        progress=progress,
    )


def clusters_of(rows: Rows) -> dict[str, str]:
    """Return each question's cluster: the name of the question's source (column `cluster_id`), which other questions
    may share. For a question without a source, its id is returned."""
    import numpy as np

    questions, sources = rows.text("doc_id"), rows.text("cluster_id")
    last = np.full(len(questions.names), -1)
    last[questions.codes] = np.arange(len(rows))
    places = np.flatnonzero(last >= 0)
    pairs = zip(places.tolist(), sources.codes[last[places]].tolist())
    return {questions.names[q]: questions.names[q] if source < 0 else sources.names[source] for q, source in pairs}


def labels_of(rows: Rows, shared: Mapping[str, Mapping[str, Any]] | None = None) -> Text:
    """Return the `method_label` of each row. shared: see `cells_of`. An old row that lacks a new option gets the same
    label as a row with the option's default."""
    import numpy as np

    methods, options = rows.text("method"), rows.text("options")
    kinds, of = np.unique(methods.codes * len(options.names) + options.codes, return_inverse=True)
    named = [divmod(int(kind), len(options.names)) if kind >= 0 else (-1, 0) for kind in kinds]
    labels = [
        method_label(name := methods.names[m], options.names[o], (shared or {}).get(name)) if m >= 0 else None
        for m, o in named
    ]
    return Text.of(labels, of)


def _pass_at(ok: Rows) -> dict[int, float]:
    """Return pass@k of the exact score by k, for each k in PASS_AT up to the smallest number of samples of any
    question. Empty if there are no scores, or if a question has only one sample."""
    scores = list(ok.scores("score").values())
    fewest = min(map(len, scores), default=0)
    if fewest < 2:
        return {}
    return {k: stats.mean_pass_at_k(scores, k) for k in PASS_AT if k <= fewest}


def _majority(ok: Rows) -> float:
    """Return maj@n: the exact score of each question's most frequent extracted answer, averaged over the questions. NaN
    if no question has two samples, or if no answer was extracted."""
    scores = ok.number("score")
    scored = ok.where(scores == scores)
    by_question = scored.scores("score")
    extracted = scored.text("extracted")
    if max(map(len, by_question.values()), default=0) < 2 or not extracted.present():
        return math.nan
    answers = scored.having(answer=extracted.codes.astype(float)).scores("answer")
    said = [[None if code < 0 else extracted.names[int(code)] for code in codes] for codes in answers.values()]
    return stats.maj_at_n(said, list(by_question.values()), same=cache(normalise_answer))


def answered(rows: Rows) -> Rows:
    """Return the rows with status ok or unscored: the report's truncation, entries, bytes and speeds come from these
    rows."""
    return rows.where(rows.text("status").is_one_of("ok", "unscored"))


def _busy(rows: Rows) -> float:
    return float((_seconds(rows, "decode_seconds") + _seconds(rows, "evict_seconds")).sum())


def _seconds(rows: Rows, name: str) -> Any:
    """Return a column of seconds, with 0 where a row has no value."""
    import numpy as np

    return np.nan_to_num(rows.number(name))


def speed(rows: Rows) -> float:
    """Return the decoded tokens of all rows divided by the rows' seconds of decoding and evicting; NaN without times.
    The first token of an answer does not count, because prefill produces it."""
    busy = _busy(rows)
    return float((present(rows.number("output_tokens")) - 1).clip(0).sum() / busy) if busy > 0 else math.nan


def speed_sd(rows: Rows) -> float:
    """Return the standard deviation of decoded tokens per second over batches. NaN with fewer than two batches.

    Rows with equal decoding seconds count as one batch, because samples that are decoded in the same steps have equal
    shares of the steps' time. The seconds of evicting may differ between rows of a batch, because the time of evicting
    entries of a prompt counts only for the samples of this prompt.
    """
    import numpy as np

    decoding = _seconds(rows, "decode_seconds")
    busy = decoding + _seconds(rows, "evict_seconds")
    timed = (busy > 0) & (rows.number("output_tokens") > 1)
    batch = np.unique(decoding[timed], return_inverse=True)[1]
    rates = np.bincount(batch, weights=rows.number("output_tokens")[timed] - 1) / np.bincount(batch, busy[timed])
    return float(rates.std(ddof=1)) if len(rates) > 1 else math.nan


def estimate(scores: Mapping[str, Sequence[float]], clusters: Mapping[str, str]) -> stats.Estimate:
    """Return the mean score of a cell with its errors and interval. scores: the samples' scores by question. clusters:
    the cluster of each question."""
    return stats.estimate(list(scores.values()), clusters=[clusters[question] for question in scores])


def paired(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], clusters: Mapping[str, str]
) -> stats.Paired | None:
    """Return the comparison of two cells on the questions that both have; None if they share no question. a, b: the
    samples' scores by question, as for `estimate`."""
    shared = [question for question in a if question in b]
    if not shared:
        return None
    return stats.paired([a[q] for q in shared], [b[q] for q in shared], clusters=[clusters[q] for q in shared])


def at_budget(method: str, budget: Budget | None) -> str:
    """Return a cell's name in a note: "gkv at 64"; only the method for a cell without a budget."""
    return method if budget is None else f"{method} at {label(budget)}"


def question_mean(scores: Mapping[str, Sequence[float]]) -> float:
    return float(stats.question_means(list(scores.values())).mean()) if scores else math.nan


def present(values: Any) -> Any:
    """Return the values that are not NaN."""
    return values[values == values]


def mean(values: Any) -> float:
    kept = present(values)
    return float(kept.mean()) if len(kept) else math.nan


def most(values: Any) -> float:
    kept = present(values)
    return float(kept.max()) if len(kept) else math.nan
