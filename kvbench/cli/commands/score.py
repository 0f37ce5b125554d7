"""``kvbench score RUN``: scores stored answers, without generating and without the model's weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import options
from kvbench.cli.checks import refuse_key
from kvbench.cli.commands.run import report_on
from kvbench.cli.commands.show import one_run
from kvbench.cli.continued import asked, continued
from kvbench.config.layers import KEYS, gather
from kvbench.config.run_config import OPERATIONAL
from kvbench.console import signals, terminal
from kvbench.console.progress import Progress
from kvbench.errors import IncompleteError
from kvbench.sources import hub
from kvbench.store import check_run_name, manifest
from kvbench.store.again import line, used, words

if TYPE_CHECKING:
    from kvbench.config.run_config import RunConfig
    from kvbench.runner.rescore import Rescored

SAVED = "interrupted: scores made so far are saved; the same command scores the other answers."
EPILOG = """Examples:
  kvbench score results/r1                       # answers that have no score yet
  kvbench score r1 --all                         # every answer again, with the scorers of this version
  kvbench score r1 --judge https://api.example.com/v1 --judge-model judge-1
  kvbench score r1 --judge local:models/judge --judge-mode pair
"""


def score(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name.", show_default=False)],
    every: Annotated[bool, typer.Option("--all", help="Also answers that have a score.", metavar="")] = False,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    judge_key_env: options.JudgeKeyEnv = None,
    judge_mode: options.JudgeMode = None,
    judge_key: options.JudgeKey = None,
    unsafe_run_code: options.UnsafeRunCode = None,
    plugin: options.Plugin = None,
    task: options.TaskName = None,
    task_file: options.TaskFile = None,
    chat_template: options.ChatTemplate = None,
    model: options.Model = None,
    config: options.ConfigFile = None,
    data: options.Data = None,
    out: options.Out = "results",
    take_over: options.TakeOver = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Score the stored answers of a run."""
    refuse_key(judge_key)
    folder = one_run(run, Path(out))
    check_run_name(folder.name, "run")
    flags: dict[str, Any] = {key: context.params.get(key) for key in KEYS}
    gathered = gather(flags, os.environ, None, Path(config) if config else None)
    settings = continued(folder.parent, folder.name, gathered)
    with hub.only(asked(settings, gathered)):
        found = _score(settings, folder, every=every, take_over=take_over, quiet=quiet)
    if found.prompt_mismatch:
        count = found.prompt_mismatch
        terminal.warning(f"{count} answers belong to prompts that are made differently now; not scored.")
    report_on(folder, quiet=quiet or json)
    _tell(found, folder, settings, json=json)


def _score(config: RunConfig, folder: Path, *, every: bool, take_over: bool, quiet: bool) -> Rescored:
    """Score the answers of a run and make its tables anew."""

    from kvbench.runner import env, same_run
    from kvbench.runner.inputs import read_inputs
    from kvbench.runner.rescore import rescore
    from kvbench.sources import models
    from kvbench.store import RunFolder

    inputs = read_inputs(config, terminal.warning)
    versions = {f"{name}_version": env.version(name) for name in ("kvbench", "torch", "transformers")}
    resume = partial(RunFolder.resume, environment=versions, take_over=take_over, allow_version_change=True)
    with signals.phase(lambda: SAVED), resume(folder.parent, folder.name) as opened:
        opened.done_keys()
        for text in opened.notices:
            terminal.warning(text)
        # Answers scored by two versions of a task would be averaged as one: either all or none.
        before = opened.info["environment"]
        same_run.check_data(folder.name, before["tasks"], inputs.tasks(), versions=not every)
        same_run.check_prompt_files(folder.name, before, same_run.model_record(config, models.state(inputs.info)))
        found = rescore(opened, inputs.works, wanted=lambda e: every or not e.ok, progress=Progress(quiet=quiet))
        opened.seal()
    return found


def _tell(found: Rescored, folder: Path, config: RunConfig, *, json: bool) -> None:
    """Say how it ended. Raises IncompleteError when answers have no score."""
    if json:
        counts = {"scored": found.scored, "failed": dict(found.failed), "strangers": found.prompt_mismatch}
        counts |= {"waiting": found.waiting, "kept": found.kept}
        terminal.data({"run": str(folder), **counts})
    else:
        kept = f" {found.kept} keep the score they have: nobody was asked for another." if found.kept else ""
        terminal.note(f"{found.scored} answers scored.{kept}")
    if found.failed or found.waiting:
        missing = dict(found.failed) | ({"without a judge": found.waiting} if found.waiting else {})
        listed = ", ".join(f"{count} {status}" for status, count in missing.items())
        settings = _given(folder, config)
        unjudged = (found.waiting or "judge_error" in found.failed) and "judge" not in settings
        needs = " --judge URL --judge-model NAME" if unjudged else ""
        again = f"'{line(['kvbench', 'score', str(folder), *words(settings)])}{needs}' tries them again"
        raise IncompleteError(f"no score for some answers ({listed}); {again}.")


def _given(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What the same command must be given again: of the run's record, as it was given this time."""
    info = manifest.read(folder)
    now = {key: getattr(config, key) for key in OPERATIONAL}
    unsafe = {"unsafe_run_code": True} if config.unsafe_run_code else {}
    return used({**info, "config": config.stored(), "environment": info["environment"] | now}) | unsafe
