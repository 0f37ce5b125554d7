"""One execution under way: cell by cell through the engine, the scores and the journal, until done or asked to stop.

runner = Runner(folder, works, plans, ...)
with signals(runner):
    runner.run(loaded, done)
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvbench.cell_plan import CellPlan
from kvbench.config import RunConfig
from kvbench.engine.loop import Engine
from kvbench.engine.model import LoadedModel
from kvbench.errors import Interrupted, SetupError
from kvbench.records import Generation
from kvbench.rows import make_row
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal, RunFolder, resume_command
from kvbench.task import Output, Score
from kvbench.work import PlannedRow, TaskWork, make_method

if TYPE_CHECKING:
    from kvbench.progress import Progress

BACKLOG = 64  # answers waiting for their scores; generation waits for them
LATER = Score(value=None, status="unscored", note="interrupted before it was scored")
AFTER_SIGNAL = 3.0  # seconds that rows being scored get to finish after a signal


class Runner:
    """State of one execution: what is done, what is being scored, whether to stop."""

    def __init__(
        self,
        folder: RunFolder,
        works: Mapping[str, TaskWork],
        plans: Sequence[CellPlan],
        progress: Progress | None,
        done: int,
        total: int,
        dtype: Any,
        device: str,
        config: RunConfig,
    ) -> None:
        self.folder, self.works, self.plans, self.progress, self.config = folder, works, plans, progress, config
        self.done, self.total = done, total
        self.host = {"device": device, "dtype": str(dtype).removeprefix("torch.")}
        self.failed: dict[str, int] = {}
        self.refused: SetupError | None = None  # by who was to score
        self.stop: int | None = None  # the signal that asked for it
        self.tokens = self.kv_now = self.kv_peak = 0
        self.scores: list[float] = []
        self._shown = 0.0

    def run(self, loaded: LoadedModel, done: set[str]) -> None:
        if self.progress:
            self.progress.begin(self.total, self.done)
        try:
            with self.folder.journal() as journal, ScorePool() as pool:
                for cell_plan in self.plans:
                    missing = [row for row in cell_plan.rows if row.key not in done]
                    if missing:
                        self._cell(loaded, cell_plan, missing, journal, pool)
                    if self.stop is not None:
                        self._interrupt(journal)
        finally:
            if self.progress:
                self.progress.end()

    def _cell(
        self, loaded: LoadedModel, cell_plan: CellPlan, missing: list[PlannedRow], journal: Journal, pool: ScorePool
    ) -> None:
        cell, work = cell_plan.cell, self.works[cell_plan.cell.task]
        if self.progress:
            self.progress.cell(cell.label)
        self.scores, self.kv_peak = [], 0
        planned = {(row.prompt.doc.doc_id, row.sample): row for row in missing}
        scoring: list[tuple[Future[Score] | None, PlannedRow, Generation]] = []

        def step(tokens: int, kv_bytes: int, slots: int) -> None:
            self.tokens, self.kv_now, self.kv_peak = self.tokens + tokens, kv_bytes, max(self.kv_peak, kv_bytes)
            self.done += len(journal.poll())
            self._show()
            if self.stop is not None:
                raise Stop

        engine = Engine(
            loaded,
            make_method(cell),
            budget=cell.budget,
            interval=self.config.interval,
            slots=cell_plan.plan.slots,
            max_tokens=cell_plan.max_tokens,
            max_output=cell_plan.max_output,
            tail=cell_plan.tail,
            prefill_chunk=self.config.prefill_chunk,
            prefill=self.config.prefill,
            on_step=step,
        )
        batches = work.batches(missing, self.config.seed)
        with contextlib.suppress(Stop):
            for generation in (g for batch in batches for g in engine.generate(batch)):
                row = planned[generation.request.doc_id, generation.sample]
                ok = generation.status == "ok"
                future = pool.submit(work.task, row.prompt.doc, output_of(row, generation)) if ok else None
                scoring.append((future, row, generation))
                scoring = [item for item in scoring if not self._kept(*item, cell_plan, journal)]
                while len(scoring) > BACKLOG and self.stop is None and self.refused is None:
                    time.sleep(0.01)
                    scoring = [item for item in scoring if not self._kept(*item, cell_plan, journal)]
                if self.refused is not None:
                    break
        patience = AFTER_SIGNAL
        while scoring and patience > 0:  # after a signal the slow ones are left, to be scored when the run goes on
            scoring = [item for item in scoring if not self._kept(*item, cell_plan, journal)]
            time.sleep(0.01 if scoring else 0)
            patience -= 0.01 if self.stop is not None else 0
        for _, row, generation in scoring:
            self._write(row, generation, LATER, cell_plan, journal)
        self.done += len(journal.flush())
        self._show(now=True)
        if self.refused is not None:
            raise self.refused

    def _kept(
        self,
        future: Future[Score] | None,
        planned: PlannedRow,
        generation: Generation,
        cell_plan: CellPlan,
        journal: Journal,
    ) -> bool:
        """Write one row if it has been scored. A failed row keeps its text and has no score."""
        if future is not None and not future.done():
            return False
        try:
            score = future.result() if future is not None else None
        except SetupError as error:  # of a judge; the answer is kept, and scored later
            score, self.refused = Score(value=None, status="unscored", note=str(error)), error
        self._write(planned, generation, score, cell_plan, journal)
        return True

    def _write(
        self,
        planned: PlannedRow,
        generation: Generation,
        score: Score | None,
        cell_plan: CellPlan,
        journal: Journal,
    ) -> None:
        row = make_row(planned, generation, score, self.works[cell_plan.cell.task].task, cell_plan, self.host)
        if row["status"] not in ("ok", "unscored"):
            self.failed[row["status"]] = self.failed.get(row["status"], 0) + 1
        elif score is not None and (headline := row[self.works[cell_plan.cell.task].task.headline]) is not None:
            self.scores.append(headline)
        prompt = planned.prompt.text if self._may_store(cell_plan.cell.task) else None
        self.done += len(journal.append(row, prompt=prompt, output=generation.text, turns=generation.turns))

    def _may_store(self, task: str) -> bool:
        """Whether questions may lie in the run's folder: gated ones only when asked for."""
        manifest = self.works[task].task.manifest
        return self.config.keep_prompts or not (manifest and manifest.gated)

    def _show(self, *, now: bool = False) -> None:
        if self.progress is None or (not now and time.monotonic() - self._shown < 0.25):
            return
        self._shown = time.monotonic()
        mean = half = None
        if n := len(self.scores):
            mean = sum(self.scores) / n
            if n > 1:
                half = 1.96 * (sum((s - mean) ** 2 for s in self.scores) / (n - 1) / n) ** 0.5
        self.progress.update(self.done, self.tokens, self.kv_now, self.kv_peak, mean, half)

    def _interrupt(self, journal: Journal) -> None:
        journal.flush()
        raise Interrupted(
            f"interrupted: {self.done} of {self.total} rows saved; continue with {resume_command(self.folder.path)}",
            128 + (self.stop or signal.SIGINT),
        )


def output_of(row: PlannedRow, generation: Generation) -> Output:
    """What a task's `score` sees of a finished sample."""
    usage = generation.usage
    return Output(
        text=generation.text,
        turns=generation.turns,
        stop_reason=generation.stop_reason,
        prompt_tokens=len(row.prompt.ids),
        output_tokens=usage.output_tokens if usage else len(generation.token_ids),
        thinking=row.prompt.thinking,
    )


class Stop(Exception):
    """Leaves the generation loop between two steps."""


@contextlib.contextmanager
def signals(runner: Runner) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run between two steps with all finished rows saved; the second ends it at
    once.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        runner.stop = number
        for each in previous:
            signal.signal(each, signal.SIG_DFL)

    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs us handles signals
        previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        for each in previous:
            signal.signal(each, ask)
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
