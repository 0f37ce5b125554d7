"""Executes jobs of a run in this process: the engine generates, tasks score, the journal stores.

When a signal or a failure ends the work, all finished rows are saved, unless the journal itself has failed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvbench.config import plugins
from kvbench.console import faults, signals
from kvbench.console.figures import Figures
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import NEW_RUN, Interrupted, SetupError, UserError
from kvbench.runner import env
from kvbench.runner.cell import dtype_name
from kvbench.runner.cell_run import CellRun
from kvbench.runner.inputs import Notice
from kvbench.runner.jobs import Job
from kvbench.runner.row_writer import RowWriter
from kvbench.runner.run_plan import RunPlan
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal

AFTER_STOP = 3.0  # seconds to wait for scores after a signal or a failure
SHOWN = 0.25  # seconds between two figures


@contextlib.contextmanager
def failures(device: str, saved: Callable[[], str]) -> Iterator[None]:
    """Turn a signal, lack of memory, or a failure of the device or of a plug-in inside the `with` statement into an
    error of one line. saved: a function that returns the end of this line: how many rows are saved, and the command
    that continues the run."""
    try:
        with signals.phase(lambda: f"interrupted: {saved()}"):
            yield
    except (SetupError, Interrupted):
        raise
    except Exception as error:
        why = faults.first_line(error)
        if faults.out_of_memory(error):
            raise SetupError(f"out of memory ({why}): {saved()}.") from error
        if faults.device_failed(error):
            raise SetupError(f"device {device} failed ({why}): {saved()}.") from error
        if (fault := plugins.failure(error)) is not None:
            kind = SetupError if isinstance(error, OSError) else UserError
            raise kind(f"{fault}: {saved()}, or correct the file and {NEW_RUN}.") from error
        raise


class Runner:
    """Executes jobs of a run in this process.

    show: receives figures for the progress display, a few times per second. say: receives warnings of one line.
    """

    def __init__(self, plan: RunPlan, show: Callable[[Figures], None], say: Notice) -> None:
        self.plan, self.show, self.say = plan, show, say
        self.writer: RowWriter | None = None
        self._cells = {index: {row.key: row for row in cell.rows} for index, cell in enumerate(plan.cells)}
        self._slots: dict[int, tuple[int, int]] = {}  # cell in which memory ran out -> (slots since then, how often)
        self._ended: set[int] = set()  # cells that ended early
        self._label = ""
        self._tokens = self._kv_now = self._kv_peak = 0
        self._shown = 0.0

    @property
    def saved(self) -> int:
        """Number of rows that this process has saved on the disk."""
        return self.writer.saved if self.writer else 0

    @property
    def failed(self) -> Counter[str]:
        """Number of failed rows by status, such as "oom"."""
        return self.writer.failed if self.writer else Counter()

    def run(self, loaded: LoadedModel, journal: Journal, jobs: Iterable[Job], ended: Callable[[int], object]) -> None:
        """Execute jobs one after the other. ended: called after each job with the number of its rows that were saved.
        Raises KVBenchError, and KeyError if a job names a row that the plan lacks."""
        device = env.device_name(self.plan.device, len(self.plan.shape.parts))
        host = {"device": device, "dtype": dtype_name(self.plan.dtype)}
        works, keep = self.plan.inputs.works, self.plan.config.keep_prompts
        with ScorePool() as pool:
            self.writer = RowWriter(journal, pool, works, host, keep_prompts=keep)
            try:
                for job in jobs:
                    ended(0 if job.cell in self._ended else self._execute(loaded, job, self.writer))
            except (signals.Signalled, Exception):
                if not journal.failed:
                    self.writer.leave(AFTER_STOP)
                raise

    def _execute(self, loaded: LoadedModel, job: Job, writer: RowWriter) -> int:
        """Execute a job, and return the number of rows that were saved."""
        cell_plan, rows = self.plan.cells[job.cell], [self._cells[job.cell][key] for key in job.keys]
        if job.cell in self._slots:
            cell_plan = cell_plan.after_lack_of_memory(*self._slots[job.cell])
        if cell_plan.cell.label != self._label:
            self._label, writer.scores, self._kv_peak = cell_plan.cell.label, [], 0
            self._tell(now=True)
        run = CellRun(
            loaded=loaded,
            cell_plan=cell_plan,
            missing={(row.prompt.doc_id, row.sample): row for row in rows},
            work=self.plan.inputs.works[cell_plan.cell.task],
            config=self.plan.config,
            writer=writer,
            on_step=self._step,
            say=self.say,
        )
        run.run()
        if run.cell_plan.oom_retries:
            self._slots[job.cell] = run.cell_plan.plan.slots, run.cell_plan.oom_retries
        if run.ended_early:
            self._ended.add(job.cell)
        writer.finish()
        self._tell(now=True)
        if writer.refused is not None:
            raise writer.refused
        return len(rows) - len(run.missing)

    def _step(self, tokens: int, kv_bytes: int, slots: int) -> None:
        assert self.writer is not None
        self._tokens, self._kv_now = self._tokens + tokens, kv_bytes
        self._kv_peak = max(self._kv_peak, kv_bytes)
        self.writer.poll()
        self._tell()

    def _tell(self, *, now: bool = False) -> None:
        if self.writer is None or (not now and time.monotonic() - self._shown < SHOWN):
            return
        self._shown = time.monotonic()
        mean = half = None
        scores = self.writer.scores
        if n := len(scores):
            mean = sum(scores) / n
            if n > 1:
                half = 1.96 * (sum((s - mean) ** 2 for s in scores) / (n - 1) / n) ** 0.5
        figures = Figures(
            cell=self._label,
            saved=self.saved,
            tokens=self._tokens,
            kv_now=self._kv_now,
            kv_peak=self._kv_peak,
            mean=mean,
            half=half,
        )
        self.show(figures)
