"""Executes a run: plan the rows, skip saved rows, generate cell by cell, score, save.

Data, prompts, the folder and the plan are checked before the weights are loaded. A row counts as saved once its record
is on disk. The command line has already done the checks that need neither torch nor a tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.console import signals, terminal
from kvbench.console.progress import Progress
from kvbench.runner import env, same_run
from kvbench.runner.cell import CellPlan
from kvbench.runner.inputs import Notice
from kvbench.runner.rescore import Rescored, rescore
from kvbench.runner.run_plan import RunPlan
from kvbench.runner.session import failures
from kvbench.runner.shard import Shard, agreed
from kvbench.runner.work import Work
from kvbench.runner.workers.executor import Order
from kvbench.runner.workers.placement import HERE, Placement
from kvbench.sources import hub
from kvbench.store import RunFolder, has_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    failed: number of failed rows by status; "unscored" is no failure. Rows that failed in this call of `execute` count.
    Rows of earlier calls count if their status is in `kvbench.store.FINAL`, because no further attempt can answer these
    rows. again: the command that continues the run. repeated: whether this call generated and scored nothing, because
    every row was saved before, with a score or a status in `FINAL`.
    """

    run_dir: Path | None  # None after a dry run
    done: int
    planned: int
    plans: tuple[CellPlan, ...]
    failed: Mapping[str, int] = field(default_factory=dict)
    again: str = ""
    repeated: bool = False


def execute(
    config: RunConfig,
    *,
    out: Path,
    run_name: str | None = None,
    resume: bool = False,
    shard: Shard | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    allow_version_change: bool = False,
    take_over: bool = False,
    sources: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    placement: Placement = HERE,
    notice: Notice | None = None,
) -> RunResult:
    """Run a configuration to the end; if its run was begun before, generate and score only what is missing.

    shard: generate only this part of the rows, in a folder whose name ends with `Shard.suffix`. resume: require that
    the run exists; `run_name` is then the whole name of its folder, with such a suffix if the run is a shard, and
    `shard` may be None, because the run's record states it. placement: where the run's jobs are executed. notice:
    receives one-line warnings; by default they go to stderr.

    Raises KVBenchError. After Ctrl-C, SIGTERM or SIGHUP, the function saves all finished rows and raises Interrupted.
    """
    say = notice or terminal.warning
    name = (run_name or config.run_name()) + ("" if shard is None or resume else shard.suffix)
    progress = progress or Progress(quiet=True)
    progress.prepare("reading the model's configuration and the prompts")
    began = same_run.began(out, name, config, resume=resume)
    shard = agreed(name, began, shard, resume=resume)
    before = began if has_rows(out / name) else {}  # a run without rows begins anew
    whole = RunPlan.make(config, before, name, dry_run=dry_run, say=say)
    plan = whole if shard is None else shard.divide(whole)
    if dry_run:
        return RunResult(run_dir=None, done=0, planned=plan.rows, plans=plan.cells)
    record = whole.record(sources or {}) | ({} if shard is None else shard.record(whole.rows))
    opener = RunFolder.resume if resume else RunFolder.open
    new: dict[str, Any] = {} if resume else {"config": config.stored(), "command": command}
    with opener(
        out,
        name,
        environment=record,
        planned=plan.rows,
        anew=True,
        take_over=take_over,
        allow_version_change=allow_version_change,
        **new,
    ) as folder:
        folder.settings = same_run.again(folder.info, config, record)
        before = folder.info["environment"]
        notices = same_run.check(name, before, record, allow_version_change=allow_version_change)
        done = folder.done_keys()
        for text in (*folder.notices, *notices):
            say(text)
        order = Order(
            config=config,
            out=str(out.absolute()),
            name=name,
            slots=tuple(cell.plan for cell in plan.cells),
            device=plan.device.type,
            downloads=hub.allowed(),
            allow_version_change=allow_version_change,
        )
        return _run(folder, plan, done, placement, order, progress, say)


def _run(
    folder: RunFolder,
    plan: RunPlan,
    done: set[str],
    placement: Placement,
    order: Order,
    progress: Progress,
    say: Notice,
) -> RunResult:
    """Generate missing rows, score answers without a score, and write the run's tables. done: keys of rows saved
    before."""
    keys = {row.key for cell in plan.cells for row in cell.rows}
    final = Counter(e.row["status"] for key, e in folder.content().entries.items() if e.final and key in keys)
    work = Work(folder, plan, len(keys & done), progress, say)
    with signals.handled(), failures(env.device_name(plan.device), work.state):
        if not keys <= done:
            folder.forget()  # otherwise the rows read from the journal would stay in memory during generation
            work.do(placement, order, done)
        # Score rows whose scoring failed before, or whose judge needs the full cache's answer, which exists only now.
        rescored = rescore(
            folder,
            plan.inputs.works,
            wanted=lambda e: e.row["status"] == "unscored" or (not e.ok and e.row["row_key"] in done),
            progress=progress,
        )
        if rescored.prompt_mismatch:
            say(
                f"{rescored.prompt_mismatch} answers stay without a score, because their task now makes other prompts. "
                "Put the task's former code, data and library versions back to score them."
            )
        folder.seal()
    return RunResult(
        run_dir=folder.path,
        done=work.done,
        planned=plan.rows,
        plans=plan.cells,
        failed=final + work.failed + Counter(rescored.failed),
        again=folder.resume_command(),
        repeated=keys <= done and rescored == Rescored(),
    )
