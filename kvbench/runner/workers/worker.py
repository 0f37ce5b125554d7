"""A worker: it plans the run as the coordinator did, loads the model, and executes jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvbench.config.plugins import load_plugins
from kvbench.console.figures import Figures
from kvbench.errors import SetupError, quote
from kvbench.runner import env, same_run
from kvbench.runner.cell import check_weights
from kvbench.runner.inputs import Notice
from kvbench.runner.jobs import Job
from kvbench.runner.run_plan import RunPlan
from kvbench.runner.session import Runner
from kvbench.runner.workers.executor import Order
from kvbench.sources import hub
from kvbench.store import Journal, folder, manifest, resume_command


class Worker:
    """Executes jobs of a run that a coordinator has opened.

    The worker's plan must agree with the run's record in model, data, prompts, methods and versions. Raises
    KVBenchError if the plan does not agree, or if this machine does not see the run's folder. Raises RuntimeError if
    the coordinator's device is a GPU and this worker sees no GPU.
    """

    def __init__(self, order: Order) -> None:
        if order.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("CUDA error: this worker sees no GPU")  # the machine's failure, see `faults`
        self._run_dir = Path(order.out) / order.name
        if not (self._run_dir / manifest.NAME).is_file():
            raise SetupError(
                f"the machine of a worker does not see the folder {quote(self._run_dir)} of the run. "
                "Give --out a folder that all machines share."
            )
        info = manifest.read(self._run_dir)
        before, allowed = info["environment"], order.allow_version_change
        folder.check_versions(order.name, info, env.compared(), allowed=allowed)
        with hub.only(order.downloads):
            load_plugins(order.config.plugin)
            self._plan = RunPlan.make(order.config, before, order.name, dry_run=False, say=_ignore, slots=order.slots)
            self._loaded = self._plan.load()
        record = self._plan.record({})
        same_run.check(order.name, before, record, allow_version_change=allowed)
        self._again = f"continue with {resume_command(self._run_dir, same_run.again(info, order.config, record))}"
        check_weights(self._plan.cells, self._loaded)

    def run(
        self, jobs: Iterable[Job], *, show: Callable[[Figures], None], say: Notice, ended: Callable[[int], object]
    ) -> None:
        """Execute jobs. show: receives figures, a few times per second. say: receives warnings of one line. ended:
        called after each job with the number of the job's rows that were saved."""
        with Journal(self._run_dir, rows_before=None, again=self._again) as journal:
            Runner(self._plan, show, say).run(self._loaded, journal, jobs, ended)


def _ignore(text: str) -> None:
    """Drop the warnings of a worker's plan, because the coordinator has shown the same warnings to the user."""
