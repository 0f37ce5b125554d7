"""Fetches the data of a run's tasks before torch is imported, and reports missing data of several tasks together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbench.config.run_config import RunConfig
from kvbench.console.problems import Several
from kvbench.errors import KVBenchError
from kvbench.runner.workload import load_task
from kvbench.sources.data import Data
from kvbench.sources.data.missing import DataMissing, together
from kvbench.taskkit.names import LM_EVAL, collapsed


def source(config: RunConfig) -> Data:
    """Return the source from which a run's tasks read their data."""
    return Data(config.data, revision=config.data_revision, allow_mismatch=config.allow_data_mismatch)


def fetch(config: RunConfig) -> None:
    """Download those data of the run's tasks that are not on this machine. Raises SetupError if data are unavailable.

    The function stops at the first lm-eval task, because lm-eval looks for its data only when it makes prompts.
    `kvbench.runner.inputs` then loads the data of this task and of all tasks after it.
    """
    data = source(config)
    names = list(itertools.takewhile(lambda name: not name.startswith(LM_EVAL), config.tasks))
    for place, name in enumerate(names):
        manifest = load_task(name, config.task_file).manifest
        try:
            if manifest is not None:
                data.ensure(name, manifest)
        except DataMissing as error:
            raise all_missing(error, config.tasks[place:], config, data) from None


def all_missing(first: DataMissing, names: Sequence[str], config: RunConfig, data: Data) -> KVBenchError:
    """Return one error that names every task whose data are known to be missing on this machine.

    The function sends no request to the network. first: the error that one task has raised already. names: all tasks
    whose data may be missing.
    """
    others = {n: load_task(n, config.task_file).manifest for n in names if n != first.task}
    errors = [first, *data.missing({n: manifest for n, manifest in others.items() if manifest is not None})]
    own = [error for error in errors if not error.task.startswith(LM_EVAL)]  # 'kvbench data fetch' gets only these
    if not own:
        return first
    all_own = together(own, collapsed([error.task for error in own]))
    return all_own if first in own else Several([first, all_own])
