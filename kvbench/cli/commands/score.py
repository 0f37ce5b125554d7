"""``kvbench score RUN``: scores stored answers, without generating and without the model's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.cli.checks import refuse_key
from kvbench.cli.commands.show import one_run
from kvbench.cli.continued import asked, continued
from kvbench.cli.options import Run, plain, takes
from kvbench.cli.start import report_on
from kvbench.config.layers import gather
from kvbench.config.settings import OPERATIONAL
from kvbench.console import signals, terminal
from kvbench.console.progress import Progress
from kvbench.errors import IncompleteError, counted
from kvbench.sources import hub
from kvbench.store import check_run_name, manifest
from kvbench.store.again import line, names_no_judge, words

if TYPE_CHECKING:
    from kvbench.config.run_config import RunConfig
    from kvbench.runner.rescore import Rescored

SAVED = "interrupted: scores made so far are saved; the same command scores the other answers."
SAVED_OF_ALL = "interrupted: scores made so far are saved; the same command scores all answers again."
EPILOG = """Examples:
  kvbench score results/r1                       # answers that have no score yet
  kvbench score r1 --all                         # every answer again, with the scorers of this version
  kvbench score r1 --judge https://api.example.com/v1 --judge-model judge-1
  kvbench score r1 --judge local:models/judge --judge-mode pair
"""


OPTIONS = (
    *("judge", "judge_model", "judge_key_env", "judge_mode", "judge_key", "unsafe_run_code", "plugin", "task"),
    *("task_file", "chat_template", "model", "config", "data", "out", "take_over", "json", "quiet"),
)


@takes(*OPTIONS)
def score(
    typed: Mapping[str, Any],
    run: Run,
    every: Annotated[bool, plain("--all", "Also score answers that have a score.")] = False,
) -> None:
    """Score the stored answers of a run."""
    quiet, json = typed["quiet"], typed["json"]
    refuse_key(typed["judge_key"])
    folder = one_run(run, Path(typed["out"]))
    check_run_name(folder.name, "run")
    gathered = gather(typed, os.environ, config=typed["config"])
    settings = continued(folder.parent, folder.name, gathered)
    with hub.only(asked(settings, gathered)):
        result = _score(settings, folder, every=every, take_over=typed["take_over"], quiet=quiet)
    if result.prompt_mismatch:
        terminal.warning(f"{result.prompt_mismatch} answers are not scored: their prompts have changed since the run.")
    report_on(folder, quiet=quiet or json)
    _tell(result, folder, settings, json=json)


def _score(config: RunConfig, folder: Path, *, every: bool, take_over: bool, quiet: bool) -> Rescored:
    """Score those answers of a run that have no score, and make the run's tables anew. every: also score answers that
    have a score."""
    from kvbench.runner import env, same_run
    from kvbench.runner.inputs import read_inputs
    from kvbench.runner.rescore import rescore
    from kvbench.sources import models
    from kvbench.store import RunFolder

    before = manifest.read(folder)["environment"]
    inputs = read_inputs(replace(config, adapter=None), terminal.warning, before=before)  # scoring reads no weights
    versions = {f"{name}_version": env.version(name) for name in ("kvbench", "torch", "transformers")}
    resume = partial(RunFolder.resume, environment=versions, take_over=take_over, allow_version_change=True)
    with signals.phase(lambda: SAVED_OF_ALL if every else SAVED), resume(folder.parent, folder.name) as opened:
        opened.done_keys()
        for text in opened.notices:
            terminal.warning(text)
        # Scores of two versions of a task must not be averaged: score all answers again, or none.
        same_run.check_data(folder.name, before["tasks"], inputs.tasks(), versions=not every)
        same_run.check_prompt_files(folder.name, before, same_run.model_record(config, models.state(inputs.info)))
        wanted, progress = (lambda e: every or not e.ok), Progress(quiet=quiet)
        found = rescore(opened, inputs.works, wanted=wanted, progress=progress, again="score again")
        opened.seal()
    return found


def _tell(result: Rescored, folder: Path, config: RunConfig, *, json: bool) -> None:
    """Print how many answers were scored. Raises IncompleteError if the scoring of an answer failed, or an answer waits
    for a judge."""
    if json:
        counts = {"scored": result.scored, "failed": dict(result.failed), "strangers": result.prompt_mismatch}
        counts |= {"waiting": result.waiting, "kept": result.kept}
        terminal.data({"run": str(folder), **counts})
    else:
        kept = f" {result.kept} keep their scores, since no judge was asked." if result.kept else ""
        terminal.note(f"{counted(result.scored, 'answer')} scored.{kept}")
    if result.failed or result.waiting:
        missing = dict(result.failed) | ({"without a judge": result.waiting} if result.waiting else {})
        listed = ", ".join(f"{count} {status}" for status, count in missing.items())
        settings = _again(folder, config)
        needs = ""
        if (result.waiting or "judge_error" in result.failed) and names_no_judge(settings.get("judge")):
            settings.pop("judge", None)
            needs = " --judge URL --judge-model NAME"
        retry = f"'{line(['kvbench', 'score', str(folder), *words(settings)])}{needs}' tries them again"
        raise IncompleteError(f"no score for some answers ({listed}); {retry}.")


def _again(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Return the settings that the user must type to score this run once more, with their values."""
    from kvbench.runner import same_run

    info = manifest.read(folder)
    now = {key: getattr(config, key) for key in OPERATIONAL}
    again = same_run.again(info, config, info["environment"] | now)
    return {name: value for name, value in again.items() if name in OPTIONS}
