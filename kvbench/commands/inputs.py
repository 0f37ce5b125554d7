"""What a run reads from disks and the hub, checked or fetched before torch is imported.

    check_inputs(config)     # SetupError, UserError

The model's files, its chat template, a sandbox for programs, and the tasks' data. What the hub gave lies in its cache
afterwards, where `kvbench.prepare` finds it.
"""

from __future__ import annotations

from kvbench import models, prompts, task_data, vocabulary
from kvbench.commands.checks import check
from kvbench.config import RunConfig
from kvbench.problems import Problems
from kvbench.work import load_task


def check_inputs(config: RunConfig) -> None:
    """Raises KVBenchError for what can be known to be missing or wrong without torch."""
    if config.chat_template is not None:
        prompts.load_template(config.chat_template)
    known = models.describe(config.model_place, config.revision)
    info = models.located(config.model_place, config.revision)
    if info != known:
        _check_again(config, info)
    if info.folder is not None:
        vocabulary.check_folder(info.folder, info.config)
    if any("code" in load_task(name, config.task_file).needs for name in config.tasks):
        from kvbench import sandbox

        sandbox.require(config.unsafe_run_code)
    task_data.fetch(config)


def _check_again(config: RunConfig, info: models.ModelInfo) -> None:
    """The checks of `kvbench.commands.checks`, now that the hub has told the model's sizes."""
    problems = Problems()
    check(config, info, problems, duplicates=True)
    problems.warnings.clear()  # they were shown
    problems.stop()
