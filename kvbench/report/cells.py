"""From rows to a cell: one method at one budget on one task, its scores over questions and what it cost.

    for label, budget, part in cells_of(rows, shared):
        make_cell(label, budget, part, scores, clusters, unfinished)

All numbers come from the rows alone. Scores are means over questions, whatever the number of their samples; what was
held and how fast it went are means over samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench import stats
from kvbench.budget import Budget
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.report.load import RUN
from kvbench.scoring.math import normalise_answer

if TYPE_CHECKING:
    import pandas as pd

PASS_AT = (1, 2, 4, 8, 16, 32)
NO_BUDGET = -1  # sorts the full cache first
SCORES = {"score": "score", "score_partial": "partial", "score_strict": "strict"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A cell minus its baseline over the same questions. `p` is adjusted.

    `verdict` and `smallest_drop` are those of `stats.Judged`.
    """

    baseline: str
    diff: float
    se: float
    low: float
    high: float
    p: float
    p_sign_flip: float  # not adjusted
    verdict: str
    smallest_drop: float
    questions: int
    found: stats.Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """One method at one budget on one task. Numbers that the rows do not have are NaN."""

    method: str  # with the options that differ from their defaults
    budget: Budget | None  # a share where the budget was given as one
    decode_bounded: bool
    evicts: bool
    score: stats.Estimate
    others: dict[str, float]  # means of the score columns, over questions as `score` is
    floor: float
    pass_at: dict[int, float]  # pass@k for the k that every question has samples for; empty with one sample
    maj: float  # score of each question's most frequent answer; NaN with one sample or without extracted answers
    samples: int
    failed: int
    unscored: int  # answers that nobody was asked to score
    truncated: float
    no_answer: float
    entries_after_evict: float
    entries_peak: float
    entries_mean: float
    kv_bytes_peak: float  # of one sequence, mean over samples
    kv_bytes_mean: float
    tokens_per_second: float
    roofline_share: float
    evict_share: float
    progress: str  # "412 of 960 rows" of an unfinished run
    against: Against | None = None
    of_full: dict[str, float] | None = None  # score, bytes and speed as shares of the full cache's on shared questions


def method_label(method: str, options: Any, shared: Mapping[str, Any] | None = None) -> str:
    """``gkv`` or ``snapkv-decode(variant=gkv)``: only the options that differ from the defaults.

    `shared` are left out where the defaults are not known, because the method is not installed here.
    """
    given = json.loads(options) if isinstance(options, str) and options else {}
    try:
        default = choose.make(method, {}).options()
    except KVBenchError:
        default = dict(shared or {})
    differing = [f"{k}={v}" for k, v in sorted(given.items()) if k not in default or default[k] != v]
    return f"{method}({', '.join(differing)})" if differing else method


def cells_of(
    rows: pd.DataFrame, shared: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Budget | None, pd.DataFrame]]:
    """(label, budget, rows) of each cell, in the order of tables: by budget, then by method."""
    columns = rows.assign(
        share=rows["budget_share"].fillna(NO_BUDGET),
        size=rows["budget"].where(rows["budget_share"].isna()).fillna(NO_BUDGET).astype(int),
        options=rows["options"].fillna("{}"),
    )
    # By label rather than by options as text: a row from before an option existed says the same with fewer words.
    kinds = columns[["method", "options"]].drop_duplicates().itertuples(index=False)
    labels = {(method, options): method_label(method, options, shared[method]) for method, options in kinds}
    columns["label"] = [labels[kind] for kind in zip(columns["method"], columns["options"])]
    for (share, size, _, label), part in columns.groupby(
        ["share", "size", "method", "label"], sort=True, observed=True
    ):
        budget = float(share) if share != NO_BUDGET else int(size) if size != NO_BUDGET else None
        yield label, budget, part


def make_cell(
    label: str,
    budget: Budget | None,
    rows: pd.DataFrame,
    by_question: dict[str, list[float]],
    clusters: dict[str, str],
    unfinished: dict[str, str],
) -> CellRow:
    ok = rows[rows["status"] == "ok"]
    made = made_rows(rows)
    busy = _busy(made)
    records = rows.to_dict("records")
    runs = [run for run in rows[RUN].unique() if run in unfinished]
    rates = stats.rates(list(ok["stop_reason"].fillna("")), list(ok["no_answer"].dropna()))
    bounded = rows["decode_bounded"].dropna()
    return CellRow(
        method=label,
        budget=budget,
        decode_bounded=bool(bounded.all()) if len(bounded) else True,
        evicts=bool(rows["interval"].notna().any()),
        score=stats.estimate(list(by_question.values()), clusters=[clusters[q] for q in by_question]),
        others={column: question_mean(stats.by_question(records, column)) for column in SCORES},
        floor=mean(ok["floor"]),
        pass_at=_pass_at(ok),
        maj=_majority(ok),
        samples=len(ok),
        failed=len(rows) - len(ok) - int((rows["status"] == "unscored").sum()),
        unscored=int((rows["status"] == "unscored").sum()),
        truncated=rates["truncated"],
        no_answer=rates["no_answer"],
        entries_after_evict=_most(made["entries_after_evict"]),
        entries_peak=_most(made["entries_peak"]),
        entries_mean=mean(made["entries_mean"]),
        kv_bytes_peak=mean(made["kv_bytes_peak"]),
        kv_bytes_mean=mean(made["kv_bytes_mean"]),
        tokens_per_second=speed(made),
        roofline_share=mean(made["roofline_share"]),
        evict_share=float(made["evict_seconds"].sum() / busy) if busy > 0 else math.nan,
        progress=", ".join(unfinished[run] for run in runs),
    )


def _pass_at(ok: pd.DataFrame) -> dict[int, float]:
    """pass@k on the exact score, for k = 1, 2, 4, ... up to the fewest samples that a question has."""
    scores = list(stats.by_question(ok.to_dict("records")).values())
    fewest = min(map(len, scores), default=0)
    if fewest < 2:
        return {}
    return {k: stats.mean_pass_at_k(scores, k) for k in PASS_AT if k <= fewest}


def _majority(ok: pd.DataFrame) -> float:
    """maj@n on the exact score, with the answers that the task extracted."""
    import pandas as pd

    scored = ok[ok["score"].notna()]
    groups = [group for _, group in scored.groupby("doc_id", sort=False)]
    if not groups or max(map(len, groups)) < 2 or scored["extracted"].isna().all():
        return math.nan
    answers = [[None if pd.isna(a) else str(a) for a in group["extracted"]] for group in groups]
    return stats.maj_at_n(answers, [list(group["score"]) for group in groups], same=normalise_answer)


def made_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with an answer: what was held and how fast it went needs no score."""
    return rows[rows["status"].isin(("ok", "unscored"))]


def _busy(made: pd.DataFrame) -> float:
    return float((made["decode_seconds"].fillna(0) + made["evict_seconds"].fillna(0)).sum())


def speed(made: pd.DataFrame) -> float:
    """Tokens per second; the first of each answer comes with its prompt."""
    busy = _busy(made)
    return float((made["output_tokens"] - 1).clip(lower=0).sum() / busy) if busy > 0 else math.nan


def question_mean(scores: Mapping[str, Sequence[float]]) -> float:
    return float(stats.question_means(list(scores.values())).mean()) if scores else math.nan


def mean(values: Any) -> float:
    kept = values.dropna()
    return float(kept.astype(float).mean()) if len(kept) else math.nan


def _most(values: Any) -> float:
    kept = values.dropna()
    return float(kept.max()) if len(kept) else math.nan
