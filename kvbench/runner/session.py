"""Executes a run's missing rows cell by cell: the engine generates, tasks score, the journal stores.

When a signal or a failure ends the run, all finished rows are saved.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvbench.console import faults, signals
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import Interrupted, SetupError
from kvbench.runner import env
from kvbench.runner.cell import CellPlan, dtype_name
from kvbench.runner.cell_run import CellRun
from kvbench.runner.inputs import Notice
from kvbench.runner.row_writer import RowWriter
from kvbench.runner.run_plan import RunPlan
from kvbench.runner.workload import PlannedRow
from kvbench.scoring.pool import ScorePool
from kvbench.store import RunFolder, resume_command

if TYPE_CHECKING:
    from kvbench.console.progress import Progress

AFTER_STOP = 3.0  # seconds to wait for scores after a signal or a failure


class Runner:
    """Executes the missing rows of a run.

    done: number of rows that were saved before. say: receives warnings of one line.
    """

    def __init__(self, folder: RunFolder, plan: RunPlan, done: int, progress: Progress | None, say: Notice) -> None:
        self.folder, self.plan, self.progress, self.say = folder, plan, progress, say
        self.host = {"device": env.device_name(plan.device, len(plan.shape.parts)), "dtype": dtype_name(plan.dtype)}
        self.writer: RowWriter | None = None
        self.tokens = self.kv_now = self.kv_peak = 0
        self._before = done
        self._shown = 0.0

    @property
    def done(self) -> int:
        """Number of rows on the disk."""
        return self._before + (self.writer.saved if self.writer else 0)

    @property
    def failed(self) -> Counter[str]:
        """Number of failed rows by status, such as "oom"."""
        return self.writer.failed if self.writer else Counter()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Turn signals, and failures of memory or device, into errors of one line that say how many rows are saved."""
        try:
            with signals.phase(lambda: f"interrupted: {self._saved()}"):
                yield
        except (SetupError, Interrupted):
            raise
        except Exception as error:
            why = faults.first_line(error)
            if faults.out_of_memory(error):
                raise SetupError(f"out of memory ({why}): {self._saved()}.") from error
            if faults.device_failed(error):
                raise SetupError(f"device {self.host['device']} failed ({why}): {self._saved()}.") from error
            raise

    def run(self, loaded: LoadedModel, done: set[str]) -> None:
        if self.progress:
            self.progress.begin(self.plan.rows, self.done)
        try:
            with self.folder.journal() as journal, ScorePool() as pool:
                works, keep = self.plan.inputs.works, self.plan.config.keep_prompts
                writer = self.writer = RowWriter(journal, pool, works, self.host, keep_prompts=keep)
                try:
                    for cell_plan in self.plan.cells:
                        if missing := [row for row in cell_plan.rows if row.key not in done]:
                            self._cell(loaded, cell_plan, missing, writer)
                except (signals.Signalled, Exception):
                    if not journal.failed:
                        writer.leave(AFTER_STOP)
                    raise
        finally:
            if self.progress:
                self.progress.end()

    def _cell(self, loaded: LoadedModel, cell_plan: CellPlan, missing: list[PlannedRow], writer: RowWriter) -> None:
        if self.progress:
            self.progress.cell(cell_plan.cell.label)
        writer.scores, self.kv_peak = [], 0
        CellRun(
            loaded=loaded,
            cell_plan=cell_plan,
            missing={(row.prompt.doc.doc_id, row.sample): row for row in missing},
            work=self.plan.inputs.works[cell_plan.cell.task],
            config=self.plan.config,
            writer=writer,
            on_step=self._step,
            say=self.say,
        ).run()
        writer.finish()
        self._show(now=True)
        if writer.refused is not None:
            raise writer.refused

    def _step(self, tokens: int, kv_bytes: int, slots: int) -> None:
        assert self.writer is not None
        self.tokens, self.kv_now, self.kv_peak = self.tokens + tokens, kv_bytes, max(self.kv_peak, kv_bytes)
        self.writer.poll()
        self._show()

    def _show(self, *, now: bool = False) -> None:
        if self.progress is None or self.writer is None or (not now and time.monotonic() - self._shown < 0.25):
            return
        self._shown = time.monotonic()
        mean = half = None
        scores = self.writer.scores
        if n := len(scores):
            mean = sum(scores) / n
            if n > 1:
                half = 1.96 * (sum((s - mean) ** 2 for s in scores) / (n - 1) / n) ** 0.5
        self.progress.update(self.done, self.tokens, self.kv_now, self.kv_peak, mean, half)

    def _saved(self) -> str:
        return f"{self.done} of {self.plan.rows} rows saved; continue with {resume_command(self.folder.path)}"
