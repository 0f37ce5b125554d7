"""Scores answers and writes their rows in the order in which their scores become known."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait

from kvbench.console import signals
from kvbench.errors import SetupError
from kvbench.records import Generation
from kvbench.runner.cell import CellPlan
from kvbench.runner.rows import Answer, make_row
from kvbench.runner.workload import PlannedRow, TaskWork
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal
from kvbench.task import Score

BACKLOG = 64  # most answers that wait for scores while generation continues
LATER = Score(value=None, status="unscored", note="interrupted before it was scored")
MOMENT = 1.0  # seconds to wait for a score before the journal is polled again


class RowWriter:
    """Writes the rows of a run.

    host: values of the columns `device` and `dtype`. keep_prompts: store also the prompts of gated tasks, whose data
    the publisher gives only to those who ask for access.
    """

    def __init__(
        self,
        journal: Journal,
        pool: ScorePool,
        works: Mapping[str, TaskWork],
        host: dict[str, str],
        *,
        keep_prompts: bool,
    ) -> None:
        self.journal, self.pool, self.works, self.host, self.keep_prompts = journal, pool, works, host, keep_prompts
        self.saved = 0  # rows on the disk
        self.failed: Counter[str] = Counter()  # number of failed rows by status
        self.scores: list[float] = []  # headline scores of the present cell
        self.refused: SetupError | None = None  # why no more rows can be scored, such as a judge that refuses the key
        self._waiting: dict[Future[Score], Answer] = {}

    def add(self, planned: PlannedRow, generation: Generation, cell_plan: CellPlan, peak: int | None) -> None:
        """Submit the answer of one sample for scoring, and write the rows whose scores are known.

        If the generation failed, write its row at once, without a score. Returns when at most BACKLOG answers wait for
        scores. peak: see `Answer.device_bytes_peak`.
        """
        answer, task = Answer(planned, generation, cell_plan, peak), self.works[cell_plan.cell.task].task
        with signals.shield():
            if generation.status == "ok":
                self._waiting[self.pool.submit(task, planned.prompt.doc, answer.output())] = answer
            else:
                self._write(answer, None)
        self.collect(most=BACKLOG)

    def poll(self) -> None:
        """Let the journal commit its rows to disk if a commit is due (see `Journal.poll`). While the engine generates,
        `Runner` calls this after each block of steps."""
        self.saved += len(self.journal.poll())

    def collect(self, *, most: int = 0, seconds: float | None = None) -> None:
        """Write rows as scores become known, until at most `most` answers wait for a score or `seconds` have passed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._write_scored()
        while len(self._waiting) > most and (deadline is None or time.monotonic() < deadline):
            wait(self._waiting, timeout=MOMENT if deadline is None else 0.1, return_when=FIRST_COMPLETED)
            self._write_scored()
            self.poll()  # so that rows which are already written reach the disk meanwhile

    def finish(self) -> None:
        """Wait for all scores, write their rows, and commit."""
        self.collect()
        self.saved += len(self.journal.flush())

    def leave(self, seconds: float) -> None:
        """Wait at most `seconds` for scores, then write the remaining rows unscored; a resumed run scores them."""
        self.collect(seconds=seconds)
        for answer in self._waiting.values():
            self._write(answer, LATER)
        self._waiting.clear()
        self.saved += len(self.journal.flush())

    def _write_scored(self) -> None:
        for future in [future for future in self._waiting if future.done()]:
            with signals.shield():
                self._write(self._waiting.pop(future), self._score(future))

    def _score(self, future: Future[Score]) -> Score:
        try:
            return future.result()
        except SetupError as error:  # keep the answer, to be scored later
            self.refused = error
            return Score(value=None, status="unscored", note=str(error))

    def _write(self, answer: Answer, score: Score | None) -> None:
        """Write one row. A failed sample keeps its text and has no score."""
        generation, task = answer.generation, self.works[answer.cell_plan.cell.task].task
        row = make_row(answer, score, task, self.host)
        if row["status"] not in ("ok", "unscored"):
            self.failed[row["status"]] += 1
        elif score is not None and (headline := row[task.headline]) is not None:
            self.scores.append(headline)
        prompt = answer.planned.prompt.text if self.keep_prompts or not task.gated else None
        self.saved += len(self.journal.append(row, prompt=prompt, output=generation.text, turns=generation.turns))
