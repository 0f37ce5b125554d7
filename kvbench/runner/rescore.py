"""Scores stored answers of a run without generating them again. The caller chooses the answers.

The run's tasks build the documents again; an answer is scored only if its prompt is still the same. A new score
becomes a new record in the journal, together with the old answer.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbench.console import signals
from kvbench.errors import SetupError
from kvbench.runner.prompt import Prompt
from kvbench.runner.rows import FACTS, scored
from kvbench.runner.workload import TaskWork
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal, RunFolder
from kvbench.store.recovery import Entry, TextReader
from kvbench.task import Output, Score

if TYPE_CHECKING:
    from kvbench.console.progress import Progress

AT_ONCE = 64  # how many answers are scored at a time, at most
KEPT = "kept"  # counted like a status: an answer that keeps its score, because the user gave no judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The result of scoring stored answers: how many answers got a score, could not be scored, or stayed unchanged."""

    scored: int = 0  # answers with a new score
    failed: Mapping[str, int] = field(default_factory=dict)  # answers that could not be scored, by status
    prompt_mismatch: int = 0  # answers to prompts that the task makes differently now
    waiting: int = 0  # answers that stay without a score, because none was made, for example without a judge
    kept: int = 0  # answers that keep their score, because no new one was made, for example without a judge


@dataclass(frozen=True, slots=True)
class _Job:
    entry: Entry
    prompt: Prompt
    texts: tuple[str | None, str | None, tuple[str, ...]]  # prompt, output, turns


def rescore(
    folder: RunFolder,
    works: Mapping[str, TaskWork],
    *,
    wanted: Callable[[Entry], bool],
    progress: Progress,
    again: str | None = None,
) -> Rescored:
    """Score those stored answers of a run for which `wanted` is true. works: the run's tasks by name. again: as for
    `Journal`.

    Raises SetupError if the judge's server refuses the API key, or if no scoring process starts. Scores that were
    written before the error stay saved.
    """
    entries = folder.content().entries
    chosen = [e for e in entries.values() if e.generated and wanted(e)]
    if not chosen:
        return Rescored()
    progress.begin(len(chosen), 0)
    mismatched = 0
    try:
        with TextReader(folder.path) as reader, folder.journal(again=again) as journal, ScorePool(workers=2) as pool:
            scoring, full = _Scoring(works, journal, pool, progress), _Baselines(entries, reader)
            try:
                for job in _jobs(chosen, works, reader):
                    if job is None:
                        mismatched += 1
                    else:
                        scoring.submit(job, _output(job, full))
                scoring.finish()
            except signals.Signalled:
                scoring.write_ready()
                raise
    finally:
        progress.end()
    failed = Counter(scoring.counts)
    done, unjudged, kept = (failed.pop(status, 0) for status in ("ok", "unscored", KEPT))
    return Rescored(scored=done, failed=dict(failed), prompt_mismatch=mismatched, waiting=unjudged, kept=kept)


class _Scoring:
    """Scores answers, and writes the scores in the order in which the answers were submitted.

    Only `write_ready`, which an interrupted call of `rescore` uses, writes scores out of order.
    """

    def __init__(self, works: Mapping[str, TaskWork], journal: Journal, pool: ScorePool, progress: Progress) -> None:
        self.works, self.journal, self.pool, self.progress = works, journal, pool, progress
        self.counts: Counter[str] = Counter()  # answers by their final status, or KEPT
        self._waiting: deque[tuple[Future[Score], _Job]] = deque()

    def submit(self, job: _Job, output: Output) -> None:
        """Begin to score an answer. Then write scores, oldest answer first, up to the first that is not known yet. If
        AT_ONCE answers wait to be written, wait for the score of the oldest."""
        task = self.works[job.entry.row["task"]].task
        self._waiting.append((self.pool.submit(task, job.prompt.doc, output), job))
        while len(self._waiting) >= AT_ONCE or (self._waiting and self._waiting[0][0].done()):
            self._write_oldest()

    def finish(self) -> None:
        """Wait for all scores and write them."""
        while self._waiting:
            self._write_oldest()

    def write_ready(self) -> None:
        """Write all scores that are known now, even if earlier answers are still being scored. Otherwise an
        interruption would lose scores for which a judge was paid."""
        for future, job in self._waiting:
            if future.done():
                self._write(future, job)

    def _write_oldest(self) -> None:
        self._waiting[0][0].exception()  # waits
        with signals.shield():
            self._write(*self._waiting.popleft())

    def _write(self, future: Future[Score], job: _Job) -> None:
        try:
            score = future.result()
        except SetupError:
            self.journal.flush()
            raise
        former = job.entry.row
        columns = scored(score)
        if columns["score"] is None and job.entry.ok:  # scoring again failed: keep the score
            self.counts[KEPT if columns["status"] == "unscored" else columns["status"]] += 1
        else:
            row = former | dict.fromkeys(FACTS) | columns | {"score_pass": job.entry.scored + 1, "created": None}
            row["task_version"] = self.works[former["task"]].task.version
            self.counts[row["status"]] += 1
            if row["status"] != "unscored":
                prompt, output, turns = job.texts
                self.journal.append(row, prompt=prompt, output=output, turns=turns)
        self.progress.update(sum(self.counts.values()), tokens=0, kv_bytes_now=0, kv_bytes_peak=0)


def _jobs(chosen: list[Entry], works: Mapping[str, TaskWork], reader: TextReader) -> Iterator[_Job | None]:
    """Yield every chosen answer with its prompt, or None for an answer whose prompt the task no longer makes."""
    prompts = {(name, p.doc_id): p for name, work in works.items() for p in work.prompts}
    for entry in chosen:
        prompt = prompts.get((entry.row["task"], entry.row["doc_id"]))
        if prompt is None or prompt.sha256 != entry.row["prompt_sha256"]:
            yield None
            continue
        text, output, turns = reader.read(entry)
        yield _Job(entry, prompt, (text, output, tuple(json.loads(turns)) if turns else ()))


class _Baselines:
    """The run's answers with the full cache, with which a judge compares the answers of other methods."""

    def __init__(self, entries: Mapping[str, Entry], reader: TextReader) -> None:
        rows = (e for e in entries.values() if e.row["method"] == "full" and e.generated)
        self._entries = {(e.row["task"], e.row["doc_id"], e.row["sample"]): e for e in rows}
        self._reader = reader

    def turns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        entry = self._entries.get((row["task"], row["doc_id"], row["sample"]))
        if entry is None:
            return ()
        _, output, turns = self._reader.read(entry)
        return tuple(json.loads(turns)) if turns else (output or "",)


def _output(job: _Job, full: _Baselines) -> Output:
    row, (_, output, turns) = job.entry.row, job.texts
    return Output(
        text=output or "",
        turns=turns or (output or "",),
        stop_reason=row["stop_reason"] or "",
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        thinking=job.prompt.thinking,
        baseline=full.turns(row),
    )
