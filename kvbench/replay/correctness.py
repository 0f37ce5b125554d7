"""Finds which of the answers that a replay reads are right.

Answers of a run have the run's scores. Answers that the replay generated are scored here; this needs a task that is
scored without a judge and without running programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, bare, counted, few, quote
from kvbench.eviction import choose
from kvbench.replay.choices import Chosen, budget_of
from kvbench.replay.traces import ForcedTrace
from kvbench.runner import rows
from kvbench.runner.workload import TaskWork
from kvbench.scoring.pool import ScorePool
from kvbench.store import read_rows
from kvbench.store.schema import as_stored
from kvbench.task import Output

Right = dict[tuple[str, int], bool]  # by (doc_id, sample), whether the score is 1


def check_scorable(work: TaskWork) -> None:
    """Raise UserError if scoring the task's answers needs a judge or a program. Replay runs neither."""
    if work.task.needs:
        raise UserError(
            f"task {quote(work.task.name)} needs a judge or a program to score its answers, and replay runs neither. "
            "Give --run with a run whose answers have scores."
        )


def scored(
    work: TaskWork, traces: Sequence[ForcedTrace], loaded: LoadedModel, say: Callable[[str], None] = lambda text: None
) -> Right:
    """Score the answers of the traces. Return whether each answer is right, by question and sample. Answers that cannot
    be scored are left out. say: called with their number and the reasons. The task must pass `check_scorable`."""
    prompts = {p.doc_id: p for p in work.prompts}
    with ScorePool() as pool:
        waiting = []
        for trace in traces:
            prompt, text = prompts[trace.request.doc_id], loaded.decode(list(trace.answer))
            output = Output(
                text=text,
                turns=(text,),
                stop_reason="length" if len(trace.answer) >= prompt.max_new_tokens else "stop",
                prompt_tokens=len(trace.prompt),
                output_tokens=len(trace.answer),
                thinking=prompt.thinking,
            )
            waiting.append(pool.submit(work.task, prompt.doc, output))
        columns = [rows.scored(future.result()) for future in waiting]
    _tell(work.task.name, len(traces), [row["note"] or row["status"] for row in columns if row["score"] is None], say)
    named = zip(traces, columns)
    return {(t.request.doc_id, t.sample): row["score"] == 1 for t, row in named if row["score"] is not None}


def stored_scores(
    folder: Path, task: str, traces: Sequence[ForcedTrace], say: Callable[[str], None] = lambda text: None
) -> Right:
    """Return, by question and sample, whether an answer that a run generated with the full cache has the score 1.
    Answers without a score are left out. say: as in `scored`."""
    stored = read_rows(folder)
    stored = stored[(stored["task"] == task) & (stored["method"] == "full")]
    asked = {(t.request.doc_id, t.sample) for t in traces}
    stored = stored[[(str(d), int(n)) in asked for d, n in zip(stored["doc_id"], stored["sample"])]]
    unscored = stored[stored["score"].isna()]
    _tell(task, len(traces), [n or s for n, s in zip(unscored["note"], unscored["status"])], say)
    stored = stored[stored["score"].notna()]
    return {(str(d), int(n)): bool(s == 1) for d, n, s in zip(stored["doc_id"], stored["sample"], stored["score"])}


def _tell(task: str, answers: int, reasons: Sequence[str], say: Callable[[str], None]) -> None:
    """Say how many of a task's answers have no score, and why. reasons: one for each of them."""
    if reasons:
        listed = few([f"{bare(reason)} ({count})" for reason, count in Counter(reasons).most_common()], 3)
        say(
            f"task {quote(task)}: {len(reasons)} of {counted(answers, 'answer')} have no score and count neither as "
            f"right nor as wrong: {listed}."
        )


def own_ratios(
    folder: Path, task: str, chosen: Sequence[Chosen], interval: int
) -> dict[Chosen, list[tuple[str, float | None]]]:
    """Return, by method and budget in `chosen`, a pair (cluster, ratio) for each of a run's answers.

    An answer counts only if its status is "ok" and if it was generated with this interval or by a method that never
    evicts. cluster: the cluster of the question. ratio: the Token Retention Ratio of the released script (see
    `analyses.retention_ratio`), or None if the answer is not right. A method and budget without answers is left out.
    """
    stored = read_rows(folder)
    stored = stored[(stored["task"] == task) & (stored["status"] == "ok")]
    stored = stored.astype(object).where(stored.notna(), None)
    records = [row for row in stored.to_dict("records") if row["interval"] in (None, interval)]
    return {c: own for c in chosen if (own := [_ratio(row) for row in records if _is_of(row, c)])}


def _is_of(row: Mapping[str, Any], chosen: Chosen) -> bool:
    budget = budget_of(row)
    same = (type(budget), budget) == (type(chosen.budget), chosen.budget)
    if row["method"] != chosen.method.name or not same:
        return False
    options = choose.make(chosen.method.name, dict(chosen.method.options)).options()
    return bool(row["options"] == as_stored("options", options))


def _ratio(row: Mapping[str, Any]) -> tuple[str, float | None]:
    budget, total = row["budget"], row["prompt_tokens"] + row["output_tokens"]
    held = 1.0 if budget is None else min(1.0, budget / total)
    return str(row["cluster_id"]), held if row["score"] == 1 else None
