"""``kvbench score RUN``: scores stored answers, without generating and without the model's weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench import terminal
from kvbench.commands import options
from kvbench.commands.checks import refuse_key
from kvbench.commands.request import resumed
from kvbench.commands.run import report_on
from kvbench.commands.show import one_run
from kvbench.errors import IncompleteError
from kvbench.problems import Problems
from kvbench.progress import Progress
from kvbench.settings import KEYS, gather

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
    data: options.Data = None,
    out: options.Out = "results",
    take_over: options.TakeOver = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Score the stored answers of a run."""
    refuse_key(judge_key)
    folder = one_run(run, Path(out))
    problems = Problems()
    flags: dict[str, Any] = {key: context.params.get(key) for key in KEYS}
    config = resumed(folder.parent, folder.name, gather(flags, os.environ, None, None), problems)
    problems.stop()

    from kvbench import env
    from kvbench.prepare import prepare
    from kvbench.rescore import rescore
    from kvbench.run import check_data
    from kvbench.store import RunFolder

    ready = prepare(config, terminal.warning)
    versions = {f"{name}_version": env.version(name) for name in ("kvbench", "torch", "transformers")}
    with RunFolder.resume(
        folder.parent, folder.name, environment=versions, take_over=take_over, allow_version_change=True
    ) as opened:
        opened.done_keys()
        for text in opened.notices:
            terminal.warning(text)
        # Answers scored by two versions of a task would be averaged as one: either all or none.
        check_data(folder.name, opened.info["environment"]["tasks"], ready.tasks(), versions=not every)
        found = rescore(opened, ready.works, wanted=lambda e: every or not e.ok, progress=Progress(quiet=quiet))
        opened.seal()
    if found.strangers:
        terminal.warning(f"{found.strangers} answers belong to prompts that are made differently now; not scored.")
    report_on(folder, quiet=quiet or json)
    if json:
        counts = {"scored": found.scored, "failed": dict(found.failed), "strangers": found.strangers}
        counts |= {"waiting": found.waiting, "kept": found.kept}
        terminal.data({"run": str(folder), **counts})
    else:
        kept = f" {found.kept} keep the score they have: nobody was asked for another." if found.kept else ""
        terminal.note(f"{found.scored} answers scored.{kept}")
    if found.failed or found.waiting:
        missing = dict(found.failed) | ({"without a judge": found.waiting} if found.waiting else {})
        listed = ", ".join(f"{count} {status}" for status, count in missing.items())
        needs = " --judge URL --judge-model NAME" if found.waiting or "judge_error" in found.failed else ""
        again = f"'kvbench score {folder}{needs}' tries them again"
        raise IncompleteError(f"no score for some answers ({listed}); {again}.")
