"""Makes the configuration of ``kvbench replay --run RUN``: the methods and budgets that the user typed, with the run's
model, tasks and settings. Reads the inputs of commands that replay answers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.commands.show import one_run
from kvbench.cli.continued import TO_ASK, continued
from kvbench.cli.request import build
from kvbench.config.layers import Gathered, Given, gather
from kvbench.config.run_config import RunConfig
from kvbench.config.settings import PER_TASK
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.errors import UserError, quote
from kvbench.eviction import choose
from kvbench.store import manifest

if TYPE_CHECKING:
    from kvbench.runner.inputs import Inputs

FILES = tuple(key for key in TO_ASK if key != "task")


def of_run(typed: dict[str, Any], problems: Problems) -> RunConfig | None:
    """Return the configuration of the run that --run names, changed by the other options that the user typed. None
    after errors, which go to `problems`.

    Raises UserError for options that cannot be changed because the run's answers depend on them, such as --seed, and
    for a task that the run does not have.
    """
    for key in ("revision", "adapter", "seed", "max_new_tokens", "stop"):
        if typed[key] not in (None, [], ()):
            raise UserError(f"--{key.replace('_', '-')} cannot be given with --run: the run's answers depend on it.")
    folder = one_run(typed["run"], Path("results"))
    needed = [key for key in TO_ASK if key != "task" or not typed["task"]]
    config = continued(folder.parent, folder.name, _again(typed), needed=needed, more_plugins=True)
    own_files = {"plugin": None, "task_file": config.task_file, "chat_template": config.chat_template}
    file = typed["suite"], typed["config"]
    tasks = typed["task"] or ([] if any(file) else list(config.tasks))
    gathered = gather(typed | own_files | {"task": tasks}, os.environ, *file)
    own_interval = gathered.first("interval") is None and not any("interval" in block for block in gathered.blocks)
    gathered.files.insert(0, {"interval": Given(config.interval, manifest.NAME)})
    asked = build(gathered, problems)
    if asked is None:
        return None
    if strange := [task for task in asked.tasks if task not in config.tasks]:
        raise UserError(f"run {quote(folder.name)} has no task {quote(strange[0])}. It has {', '.join(config.tasks)}.")
    grids = (
        dataclasses.replace(
            grid,
            tasks=(task,),
            intervals=_intervals(config, task) if own_interval else grid.intervals,
            **{name: config.for_task(name, task) for name in PER_TASK},
        )
        for grid in asked.grids
        for task in grid.tasks
    )
    own: dict[str, Any] = {
        "grids": tuple(grids),
        "data": asked.data or config.data,
        "device": asked.device,
        "dtype": asked.dtype if typed["dtype"] else config.dtype,
        "interval": asked.interval,
    }
    return dataclasses.replace(config, **own)


def _intervals(config: RunConfig, task: str) -> tuple[int, ...]:
    """Return the intervals at which the run's methods evict on a task; the run's interval if none evicts."""
    evicting = (cell for cell in config.cells() if cell.task == task and cell.method.evicts)
    return tuple(dict.fromkeys(map(config.interval_of, evicting))) or (config.interval,)


def _again(typed: dict[str, Any]) -> Gathered:
    """Return the settings that `continued` takes from the user instead of the run's record.

    These are the files that only the user may name (by a flag or an environment variable), and the new folder of a
    moved model (by a flag). typed: the options that the user typed, by name.
    """
    given = gather({key: typed[key] for key in (*FILES, "model")}, os.environ)
    return Gathered([], {key: found for key, found in given.variables.items() if key in FILES}, given.flags)


def unscored(config: RunConfig) -> RunConfig:
    """Return the configuration without judge and sandbox, for commands that score nothing."""
    return dataclasses.replace(config, judge="none", unsafe_run_code=True)


def inputs_of(config: RunConfig, folder: Path | None) -> Inputs:
    """Read the inputs of a replay. folder: the folder of the run whose answers are replayed; None: the model answers.

    Raises UserError if the model, its chat template or the tasks' data changed since the run's answers were generated.
    """
    from kvbench.runner import same_run
    from kvbench.runner.inputs import read_inputs
    from kvbench.sources import models

    before = {} if folder is None else manifest.read(folder)["environment"]
    inputs = read_inputs(unscored(config), terminal.warning, before=before)
    if folder is not None:
        record = same_run.model_record(config, models.state(inputs.info), inputs.adapter)
        same_run.check_model(folder.name, before, record)
        same_run.check_data(folder.name, before.get("tasks", {}), inputs.tasks())
    return inputs


def named(config: RunConfig, tasks: list[str] | None) -> set[str]:
    """Return the names that kvbench may look up on the hub: the methods' draft models and, if the user typed tasks,
    those tasks. The run's model is not among these names."""
    methods = [choose.make(m.name, dict(m.options)) for m in config.methods if "draft" in dict(m.options)]
    return {draft for method in methods for draft in method.drafts()} | (set(config.tasks) if tasks else set())
