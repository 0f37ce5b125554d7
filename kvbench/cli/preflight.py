"""Checks or fetches the inputs of a run from disk and hub, before torch is imported.

    check_inputs(config)     # SetupError, UserError

These are the model's files, its chat template, a sandbox for programs, and the tasks' data. Files from the hub stay in
its cache, where `kvbench.runner.inputs` finds them.
"""

from __future__ import annotations

from kvbench.cli.checks import check
from kvbench.config.run_config import RunConfig
from kvbench.console.problems import Problems
from kvbench.runner import task_data
from kvbench.runner.workload import load_task
from kvbench.sources import models, vocabulary
from kvbench.taskkit import prompts


def check_inputs(config: RunConfig) -> None:
    """Raise KVBenchError for inputs that are missing or wrong, as far as this is known without torch."""
    if config.chat_template is not None:
        prompts.load_template(config.chat_template)
    known = models.describe(config.model_place, config.revision)
    info = models.located(config.model_place, config.revision)
    if info != known:
        _check_again(config, info)
    if info.folder is not None:
        vocabulary.check_folder(info.folder, info.config)
    if any("code" in load_task(name, config.task_file).needs for name in config.tasks):
        from kvbench.scoring import sandbox

        sandbox.require(config.unsafe_run_code)
    task_data.fetch(config)


def _check_again(config: RunConfig, info: models.ModelInfo) -> None:
    """Repeat `kvbench.cli.checks` with the model's sizes, once the hub has given its config."""
    problems = Problems()
    check(config, info, problems, duplicates=True)
    problems.warnings.clear()  # the first check showed them
    problems.stop()
