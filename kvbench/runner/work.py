"""The generation of a run's missing rows, by this process alone or by several workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvbench.console.figures import Figures
from kvbench.console.progress import Progress
from kvbench.errors import counted
from kvbench.runner.cell import check_weights
from kvbench.runner.inputs import Notice
from kvbench.runner.jobs import jobs_of
from kvbench.runner.run_plan import RunPlan
from kvbench.runner.session import Runner
from kvbench.runner.workers.coordinator import Coordinator
from kvbench.runner.workers.executor import Order
from kvbench.runner.workers.placement import Placement
from kvbench.store import RunFolder


class Work:
    """The generation of a run's missing rows. before: number of rows that were saved before this process began."""

    def __init__(self, folder: RunFolder, plan: RunPlan, before: int, progress: Progress, say: Notice) -> None:
        self.folder, self.plan, self.progress, self.say = folder, plan, progress, say
        self._before = before
        self._crew: Runner | Coordinator | None = None

    @property
    def done(self) -> int:
        """Number of rows on the disk."""
        return self._before + (self._crew.saved if self._crew else 0)

    @property
    def failed(self) -> Counter[str]:
        """Number of rows that failed since this process began, by status, such as "oom"."""
        return self._crew.failed if self._crew else Counter()

    def state(self) -> str:
        """Return the end of a message: how many rows are saved, and the command that continues the run."""
        return f"{self.done} of {counted(self.plan.rows, 'row')} saved; continue with {self.folder.resume_command()}"

    def do(self, placement: Placement, order: Order, done: Collection[str]) -> None:
        """Generate the rows that are not `done`, and save them. Raises KVBenchError."""
        workers = self.plan.workers(self.plan.rows - self.done)
        executor = placement.executor(order, self.plan.device, workers)
        try:
            if executor is None:
                self._alone(done)
                return
            self.plan.release()
            self._crew = crew = Coordinator(
                executor,
                self.folder.path,
                before=self._before,
                progress=self.progress,
                say=self.say,
                labels=[cell.cell.label for cell in self.plan.cells],
                state=self.state,
            )
            self.progress.begin(self.plan.rows, self.done)
            crew.run(jobs_of(self.plan.cells, done, whole=False))
        finally:
            self.progress.end()

    def _alone(self, done: Collection[str]) -> None:
        """Generate the rows in this process, with one job per cell."""
        self.progress.prepare("loading the model's weights")
        loaded = self.plan.load()
        check_weights(self.plan.cells, loaded)
        self._crew = runner = Runner(self.plan, self._show, self.say)
        self.progress.begin(self.plan.rows, self.done)
        with self.folder.journal() as journal:
            runner.run(loaded, journal, jobs_of(self.plan.cells, done, whole=True), ended=lambda rows: None)

    def _show(self, figures: Figures) -> None:
        self.progress.cell(figures.cell)
        self.progress.update(
            self._before + figures.saved, figures.tokens, figures.kv_now, figures.kv_peak, figures.mean, figures.half
        )
