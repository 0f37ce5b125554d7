"""Scores stored answers again, without generating: those that have no score yet, or all of them.

    with RunFolder.resume("results", "r1", environment=versions) as folder:
        rescore(folder, read_inputs(config, say).works, wanted=lambda entry: not entry.ok)
        folder.seal()

Documents are made anew by the run's own tasks and data; a row is scored only against the document whose prompt it was
asked with. A new score is one more record in the journal; the answer stays what it was.
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
from kvbench.runner.rows import scored
from kvbench.runner.workload import TaskWork
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal, RunFolder
from kvbench.store.recovery import Entry, TextReader, read_journal
from kvbench.task import Output, Score

if TYPE_CHECKING:
    from kvbench.console.progress import Progress

FACTS = ("verdict", "passed_lcb", "passed_native", "sandbox_tier", "sandbox_selftest", "python_version", "judge")
AT_ONCE = 64  # answers being scored
KEPT = "kept"  # no status of a row: it has a score, and nobody was asked for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """How it ended. `failed` counts by status what has no new score even so; `strangers` were asked with other prompts.

    waiting: without a score, for a judge that nobody named. `kept` have one and keep it, since nobody was asked again.
    """

    scored: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    strangers: int = 0
    waiting: int = 0
    kept: int = 0


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
    progress: Progress | None = None,
) -> Rescored:
    """Score the answers of a run that are `wanted`.

    Raises:
        SetupError: the judge does not let us in, or no scoring process starts. Scores made before are saved.
    """
    entries = read_journal(folder.path).entries
    chosen = [e for e in entries.values() if e.generated and wanted(e)]
    if not chosen:
        return Rescored()
    if progress:
        progress.begin(len(chosen), 0)
    counts: Counter[str] = Counter()
    strangers = 0
    try:
        with TextReader(folder.path) as reader, folder.journal() as journal, ScorePool(workers=2) as pool:
            waiting: deque[tuple[Future[Score], _Job]] = deque()
            full = _Baselines(entries, reader)

            def take() -> None:
                """Write the oldest score once it is there."""
                waiting[0][0].exception()
                with signals.shield():
                    _keep(*waiting.popleft(), works, journal, counts, progress)

            try:
                for job in _jobs(chosen, works, reader):
                    if job is None:
                        strangers += 1
                        continue
                    work = works[job.entry.row["task"]]
                    waiting.append((pool.submit(work.task, job.prompt.doc, _output(job, full)), job))
                    while len(waiting) >= AT_ONCE or (waiting and waiting[0][0].done()):
                        take()
                while waiting:
                    take()
            except signals.Signalled:  # scores behind a slow one may have cost money
                for future, job in waiting:
                    if future.done():
                        _keep(future, job, works, journal, counts, progress)
                raise
    finally:
        if progress:
            progress.end()
    done, unjudged, kept = (counts.pop(status, 0) for status in ("ok", "unscored", KEPT))
    return Rescored(scored=done, failed=dict(counts), strangers=strangers, waiting=unjudged, kept=kept)


def _jobs(chosen: list[Entry], works: Mapping[str, TaskWork], reader: TextReader) -> Iterator[_Job | None]:
    """Every chosen answer with its document; None where there is no document with its prompt."""
    prompts = {(name, p.doc.doc_id): p for name, work in works.items() for p in work.prompts}
    for entry in chosen:
        prompt = prompts.get((entry.row["task"], entry.row["doc_id"]))
        if prompt is None or prompt.sha256 != entry.row["prompt_sha256"]:
            yield None
            continue
        text, output, turns = reader.read(entry)
        yield _Job(entry, prompt, (text, output, tuple(json.loads(turns)) if turns else ()))


class _Baselines:
    """The full cache's answers to the questions of a run, for judges that compare."""

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


def _keep(
    future: Future[Score],
    job: _Job,
    works: Mapping[str, TaskWork],
    journal: Journal,
    counts: Counter[str],
    progress: Progress | None,
) -> None:
    """Write a new score. An answer that nobody was asked about stays as it is."""
    try:
        score = future.result()
    except SetupError:
        journal.flush()
        raise
    former = job.entry.row
    if score.value is None and job.entry.ok:  # a failure to score it again takes nothing away
        counts[KEPT if score.status == "unscored" else score.status] += 1
        _show(counts, progress)
        return
    row = former | dict.fromkeys(FACTS) | scored(score) | {"score_pass": job.entry.scored + 1, "created": None}
    row["task_version"] = works[former["task"]].task.version
    counts[row["status"]] += 1
    if row["status"] != "unscored":
        prompt, output, turns = job.texts
        journal.append(row, prompt=prompt, output=output, turns=turns)
    _show(counts, progress)


def _show(counts: Counter[str], progress: Progress | None) -> None:
    if progress:
        progress.update(sum(counts.values()), tokens=0, kv_bytes_now=0, kv_bytes_peak=0)
