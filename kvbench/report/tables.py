"""From rows to statements: for each task, every method at every budget with error bars, cost and a paired comparison.

    for table in make_tables(load([Path("results/demo")]), baseline="full"):
        table.cells[0].score.mean, table.cells[0].against.diff

All numbers come from the rows alone. Comparisons are paired question by question and their p-values adjusted by Holm
over the table. A cell that could not be compared has `against` None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench import stats
from kvbench.budget import Budget
from kvbench.budget import label as label_of
from kvbench.errors import KVBenchError, UserError, show
from kvbench.eviction import choose
from kvbench.registry import did_you_mean
from kvbench.report.load import RUN, Group, Loaded
from kvbench.scoring.math import normalise_answer
from kvbench.task_names import get_task

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
PASS_AT = (1, 2, 4, 8, 16, 32)
NO_BUDGET = -1  # sorts the full cache first
SCORES = {"score": "score", "score_partial": "partial", "score_strict": "strict"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A cell minus its baseline over the same questions. `p` is adjusted.

    verdict: better, worse, tied (its interval holds zero), unclear (it does not, but the adjusted test is not sure
    either) or unknown (one question).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """One method at one budget on one task. Numbers that the rows do not have are NaN."""

    method: str  # with the options that differ from their defaults
    budget: Budget | None  # a share where the budget was given as one
    decode_bounded: bool
    evicts: bool
    score: stats.Estimate
    others: dict[str, float]  # means of the other score columns
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
    of_full: dict[str, float] | None = None  # score, bytes and speed as a share of the full cache's


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """One task in one comparable group. `headline` is the column behind `CellRow.score`."""

    group: str
    task: str
    headline: str
    interval: int | None
    cells: list[CellRow]
    notes: list[str]


def make_tables(loaded: Loaded, baseline: str | None = None) -> list[TaskTable]:
    """One table for each task of each group. `baseline`: a method; by default the full cache where it was run."""
    pairs = _variants(loaded)
    shared = shared_options(loaded)
    there = sorted(shared)
    labels = {method_label(method, options, shared[method]) for method, options in pairs}
    name = "full" if not baseline else baseline if baseline in (*labels, *there) else choose.canonical(baseline)
    if baseline and name not in there and name not in labels:
        raise UserError(f"--baseline {show(name)} was not run.{did_you_mean(name, there)} Methods: {', '.join(there)}.")
    return [_table(group, name, loaded.unfinished, shared) for group in loaded.groups]


def _variants(loaded: Loaded) -> list[tuple[str, str]]:
    """Every method with its options as text."""
    named = [group.rows[["method", "options"]].drop_duplicates() for group in loaded.groups]
    return [(str(m), o) for part in named for m, o in zip(part["method"], part["options"].fillna("{}"))]


def shared_options(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """For each method the options that have one value in all its rows."""
    pairs = _variants(loaded)
    return {method: _shared([o for m, o in pairs if m == method]) for method, _ in pairs}


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


def _shared(options: Sequence[str]) -> dict[str, Any]:
    """The options that have one value in all rows of a method."""
    tables = [json.loads(text) for text in options]
    return {k: v for k, v in tables[0].items() if all(k in table and table[k] == v for table in tables)}


def _table(
    group: Group, baseline: str, unfinished: dict[str, str], shared: Mapping[str, Mapping[str, Any]]
) -> TaskTable:
    rows, headline = group.rows, headline_of(group.task)
    cells: list[CellRow] = []
    scores: list[dict[str, list[float]]] = []
    clusters: dict[str, str] = dict(zip(rows["doc_id"], rows["cluster_id"].fillna(rows["doc_id"])))
    for label, budget, part in cells_of(rows, shared):
        by_question = stats.by_question(part.to_dict("records"), headline)
        scores.append(by_question)
        cells.append(_cell(label, budget, part, by_question, clusters, unfinished))
    cells = _compare(cells, scores, clusters, baseline)
    intervals = rows["interval"].dropna().unique()
    interval = int(intervals[0]) if len(intervals) else None
    return TaskTable(
        group=group.label,
        task=group.task,
        headline=headline,
        interval=interval,
        cells=_ratios(cells),
        notes=_notes(cells, scores),
    )


def headline_of(task: str) -> str:
    """The task's own headline column; of a task that is not installed here, the plain score."""
    try:
        return get_task(task).headline
    except KVBenchError:
        return "score"


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


def _cell(
    label: str,
    budget: Budget | None,
    rows: pd.DataFrame,
    by_question: dict[str, list[float]],
    clusters: dict[str, str],
    unfinished: dict[str, str],
) -> CellRow:
    ok = rows[rows["status"] == "ok"]
    made = rows[rows["status"].isin(("ok", "unscored"))]  # what was held and how fast it went needs no score
    busy = (made["decode_seconds"].fillna(0) + made["evict_seconds"].fillna(0)).sum()
    runs = [run for run in rows[RUN].unique() if run in unfinished]
    rates = stats.rates(list(ok["stop_reason"].fillna("")), list(ok["no_answer"].dropna()))
    bounded = rows["decode_bounded"].dropna()
    return CellRow(
        method=label,
        budget=budget,
        decode_bounded=bool(bounded.all()) if len(bounded) else True,
        evicts=bool(rows["interval"].notna().any()),
        score=stats.estimate(list(by_question.values()), clusters=[clusters[q] for q in by_question]),
        others={column: _mean(ok[column]) for column in SCORES},
        floor=_mean(ok["floor"]),
        pass_at=_pass_at(ok),
        maj=_majority(ok),
        samples=len(ok),
        failed=len(rows) - len(ok) - int((rows["status"] == "unscored").sum()),
        unscored=int((rows["status"] == "unscored").sum()),
        truncated=rates["truncated"],
        no_answer=rates["no_answer"],
        entries_after_evict=_most(made["entries_after_evict"]),
        entries_peak=_most(made["entries_peak"]),
        entries_mean=_mean(made["entries_mean"]),
        kv_bytes_peak=_mean(made["kv_bytes_peak"]),
        kv_bytes_mean=_mean(made["kv_bytes_mean"]),
        tokens_per_second=float((made["output_tokens"] - 1).clip(lower=0).sum() / busy) if busy > 0 else math.nan,
        roofline_share=_mean(made["roofline_share"]),
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


def _compare(
    cells: Sequence[CellRow], scores: Sequence[dict[str, list[float]]], clusters: dict[str, str], baseline: str
) -> list[CellRow]:
    """Each cell against the baseline at its own budget, or against the baseline that has none."""
    label = _baseline_label([cell.method for cell in cells], baseline)
    places = {_budget(cell): i for i, cell in reversed(list(enumerate(cells))) if cell.method == label}
    found: list[tuple[int, int, stats.Paired]] = []
    for i, cell in enumerate(cells):
        base = places.get("", places.get(_budget(cell)))
        shared = [q for q in scores[i] if base is not None and q in scores[base]]
        if base is None or base == i or not shared:
            continue
        a, b = [scores[i][q] for q in shared], [scores[base][q] for q in shared]
        found.append((i, base, stats.paired(a, b, clusters=[clusters[q] for q in shared])))
    adjusted = stats.holm([result.p for _, _, result in found])
    compared = list(cells)
    for (i, base, result), p in zip(found, adjusted):
        verdict = "better" if result.diff > 0 else "worse"
        if p > ALPHA or result.diff == 0:  # a difference whose own interval leaves zero out is not called none
            verdict = "tied" if result.low <= 0 <= result.high else "unclear"
        compared[i] = replace(
            cells[i],
            against=Against(
                baseline=cells[base].method,
                diff=result.diff,
                se=result.se,
                low=max(result.low, -1.0),  # scores lie between 0 and 1
                high=min(result.high, 1.0),
                p=p,
                p_sign_flip=result.p_sign_flip,
                verdict=verdict if result.df > 0 else "unknown",
                smallest_drop=result.smallest_drop,
                questions=result.questions,
            ),
        )
    return compared


def _budget(cell: CellRow) -> str:
    """The budget as it is typed; empty without one."""
    return "" if cell.budget is None else label_of(cell.budget)


def _baseline_label(labels: Sequence[str], baseline: str) -> str:
    """The baseline's label in a table: exactly what was asked for, else its only variant."""
    variants = sorted({label for label in labels if label.split("(")[0] == baseline})
    if baseline in labels or not variants:
        return baseline
    if len(variants) > 1:
        raise UserError(f"--baseline {show(baseline)} was run as {' and '.join(variants)}; give one of these.")
    return variants[0]


def _ratios(cells: Sequence[CellRow]) -> list[CellRow]:
    full = next((cell for cell in cells if not cell.evicts), None)
    if full is None:
        return list(cells)

    def share(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    return [
        replace(
            cell,
            of_full={
                "score": share(cell.score.mean, full.score.mean),
                "bytes": share(cell.kv_bytes_peak, full.kv_bytes_peak),
                "speed": share(cell.tokens_per_second, full.tokens_per_second),
            },
        )
        for cell in cells
    ]


def _notes(cells: Sequence[CellRow], scores: Sequence[dict[str, list[float]]]) -> list[str]:
    notes = []
    floors = {_budget(c): c.floor for c in cells if c.floor == c.floor}
    if floors:
        listed = ", ".join(f"{floor:.3f} at {budget}" for budget, floor in floors.items())
        notes.append(f"Floor, what is scored before anything is evicted: {listed}.")
    if len({(c.score.questions, c.samples) for c in cells}) == 1:
        notes.append(f"{cells[0].score.questions} questions, {cells[0].samples} samples in every cell.")
    drops = [c.against.smallest_drop for c in cells if c.against and c.against.smallest_drop > 0]
    if drops:
        notes.append(
            f"A true drop of {max(drops):.3f} is found with 80% power in every comparison (one-sided test at 5%)."
        )
    if len({frozenset(s) for s in scores}) > 1:
        notes.append("Cells have different questions; differences are over the shared ones only.")
    idle = [f"{c.method} at {_budget(c)}" for c in cells if c.evicts and math.isnan(c.entries_after_evict)]
    if idle:
        notes.append(f"Evicted nothing, so these are the full cache's answers: {', '.join(idle)}.")
    if any(not cell.decode_bounded for cell in cells if cell.evicts):
        notes.append(
            "* generated entries are not bounded by the budget (most evict the prompt only). Compare by bytes."
        )
    return notes


def _mean(values: Any) -> float:
    kept = values.dropna()
    return float(kept.astype(float).mean()) if len(kept) else math.nan


def _most(values: Any) -> float:
    kept = values.dropna()
    return float(kept.max()) if len(kept) else math.nan
