"""The run loop: plan the rows, skip those already saved, drive the engine cell by cell, score, keep.

    result = execute(config, out=Path("results"))

Everything that can fail cheaply fails before the weights are loaded: data, prompts, the folder, the plan. A row
counts once its record is on disk. The command line does the checks that need neither torch nor a tokenizer before it
gets here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import plugins
from kvbench.config.run_config import OPERATIONAL, RunConfig
from kvbench.console import signals, terminal
from kvbench.engine.attention.flash import check_attn
from kvbench.engine.attention.geometry import ProbeFailed
from kvbench.engine.model.load import load, pick_device, pick_dtype
from kvbench.engine.model.shape import ModelShape, estimate_shape, known_shape, read_shape, use_threads
from kvbench.engine.plan import measure
from kvbench.errors import show
from kvbench.runner import env, same_run
from kvbench.runner.cell import CellPlan, MethodState, check_weights, plan_rows
from kvbench.runner.inputs import Notice, Prepared, prepare
from kvbench.runner.rescore import Rescored, rescore
from kvbench.runner.session import Runner
from kvbench.runner.workload import TaskWork
from kvbench.sources import models
from kvbench.store import RunFolder, again

if TYPE_CHECKING:
    from kvbench.console.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `failed` counts rows with a status other than "ok", by status.

    `repeated`: every row was there before, with its score.
    """

    run_dir: Path | None  # None after a dry run
    done: int
    planned: int
    plans: tuple[CellPlan, ...]
    failed: Mapping[str, int] = field(default_factory=dict)
    repeated: bool = False


def execute(
    config: RunConfig,
    *,
    out: Path,
    run_name: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    allow_version_change: bool = False,
    take_over: bool = False,
    sources: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    notice: Notice | None = None,
) -> RunResult:
    """Run a configuration to the end, continuing what is already there.

    Args:
        out: folder of runs; the run's own folder is `run_name`, by default model and configuration hash.
        resume: the run must exist.
        notice: receives one-line warnings; default prints them to stderr.

    Raises:
        KVBenchError: see the subclasses; Interrupted after Ctrl-C, SIGTERM or SIGHUP, with all finished rows saved.
    """
    say = notice or terminal.warning
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    check_attn(config.attn, device, dtype)
    name = run_name or config.run_name()
    info = models.fetched(config.model_place, config.revision)
    model = same_run.model_record(config, models.state(info))
    same_run.check_model(name, same_run.began(out, name, config, resume=resume), model)
    ready = prepare(config, say, info)
    works = ready.works
    load_model = partial(
        load,
        ready.where,
        revision=info.commit or config.revision,
        device=str(device),
        dtype=config.dtype,
        attn=config.attn,
    )
    shape, early = (_plan_shape(ready, say), None) if dry_run else known_shape(ready.config, load_model)
    threads = use_threads(shape, device)
    machine = measure(device, dtype)
    methods = {choice: MethodState.of(choice, ready.config, info) for choice in config.methods}
    plans = tuple(
        plan_rows(
            cell,
            works[cell.task],
            config,
            shape,
            machine,
            model["model"],
            methods[cell.method],
            ready.context,
            device,
            dtype,
        )
        for cell in config.cells()
    )
    total = sum(len(p.rows) for p in plans)
    if dry_run:
        return RunResult(run_dir=None, done=0, planned=total, plans=plans)

    environment = {
        "kvbench_version": env.version("kvbench"),
        "torch_version": env.version("torch"),
        "transformers_version": env.version("transformers"),
        "versions": env.versions(),
        "git": env.git_commit(),
        "machine": env.machine(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        **{name: getattr(config, name) for name in OPERATIONAL},
        **dict.fromkeys(_unused(ready.works)),
        "data_variable": os.environ.get("KVBENCH_DATA"),
        "plugins": plugins.loaded(config.plugin),
        "sources": dict(sources or {}),
        **model,
        **same_run.method_record(methods),
        "tasks": ready.tasks(),
        "kv_cache": {  # what an entry takes, for `kvbench report --memory`
            "element_bytes": dtype.itemsize,
            "layers": [
                {"kv_heads": g.kv_heads, "head_dim": g.head_dim, "value_dim": g.value_dim, "window": g.window}
                for g in shape.geometry
            ],
        },
        "plans": [{"cell": p.cell.label, "plan": p.plan.line()} for p in plans],
    }
    opener = RunFolder.resume if resume else RunFolder.open
    extra: dict[str, Any] = {} if resume else {"config": config.stored(), "command": command, "planned": total}
    with opener(
        out, name, environment=environment, take_over=take_over, allow_version_change=allow_version_change, **extra
    ) as folder:
        before = folder.info["environment"]
        notices = same_run.check(name, before, environment, allow_version_change=allow_version_change)
        done = folder.done_keys()
        for text in (*folder.notices, *notices):
            say(text)
        keys = {row.key for p in plans for row in p.rows}
        runner = Runner(folder, works, plans, progress, len(keys & done), total, dtype, str(device), config, say)
        with signals.handled(), runner.failures():
            if not keys <= done:
                loaded = early or load_model()
                check_weights(plans, loaded)
                runner.run(loaded, done)
            # What nobody could score before, and what a judge compares with answers that only now are all there.
            rescored = rescore(
                folder,
                works,
                wanted=lambda e: e.row["status"] == "unscored" or (not e.ok and e.row["row_key"] in done),
                progress=progress,
            )
            if rescored.strangers:
                say(f"{rescored.strangers} answers without a score belong to prompts that are made differently now.")
            folder.seal()
        failed = runner.failed + Counter(rescored.failed)
        repeated = keys <= done and rescored == Rescored()
        return RunResult(
            run_dir=folder.path, done=runner.done, planned=total, plans=plans, failed=failed, repeated=repeated
        )


def _unused(works: Mapping[str, TaskWork]) -> tuple[str, ...]:
    """The settings for scoring that no task of the run has a use for."""
    needs = {need for work in works.values() for need in work.task.needs}
    return (*(again.JUDGE if "judge" not in needs else ()), *(("unsafe_run_code",) if "code" not in needs else ()))


def _plan_shape(ready: Prepared, say: Notice) -> ModelShape:
    """The shape for a plan without weights, estimated where only the loaded model shows its layers."""
    try:
        return read_shape(ready.config)
    except ProbeFailed:
        shape = estimate_shape(ready.config)
    say(
        f"the layers of model type {show(ready.config.model_type)} show only when its weights are loaded; slots, "
        "memory and speed of this plan are estimated from its config.json."
    )
    return shape
