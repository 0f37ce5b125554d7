"""``kvbench run``: gather, check, and only then hand over to the engine (`kvbench.run`, which imports torch)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvbench import hub, terminal
from kvbench.budget import label
from kvbench.commands import options
from kvbench.commands.checks import check, refuse_key
from kvbench.commands.continued import asked, continued
from kvbench.commands.request import build
from kvbench.config import RunConfig
from kvbench.errors import IncompleteError, UserError, show
from kvbench.models import TINY, ModelInfo, describe
from kvbench.problems import Problems
from kvbench.progress import Progress, size
from kvbench.settings import KEYS, Gathered, Given, gather, unknown_variables
from kvbench.store import check_out, check_run_name, resume_command
from kvbench.store.again import OUT
from kvbench.store.redact import holds_secret

if TYPE_CHECKING:
    from kvbench.run import RunResult

EPILOG = """Examples:
  kvbench run --method gkv --budget 64 --interval 32 --task walk
  kvbench run --method full,gkv,h2o --budget 48,25% --interval 32 --task walk,lookup --limit 32 --run-name first
  kvbench run --suite demo
  kvbench run --model Qwen/Qwen3-4B --method rkv --budget 1024 --task aime24 --dry-run
  kvbench run --resume first
"""


def run(
    context: typer.Context,
    method: options.Method = None,
    budget: options.Budget = None,
    task: options.TaskName = None,
    task_file: options.TaskFile = None,
    method_opt: options.MethodOpt = None,
    plugin: options.Plugin = None,
    model: options.Model = None,
    revision: options.Revision = None,
    suite: options.Suite = None,
    config: options.ConfigFile = None,
    limit: options.Limit = None,
    samples: options.Samples = None,
    max_new_tokens: options.MaxNewTokens = None,
    seed: options.Seed = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    allow_duplicate_samples: options.Duplicates = False,
    prompt_style: options.PromptStyle = None,
    thinking: options.Thinking = None,
    chat_template: options.ChatTemplate = None,
    no_chat_template: options.NoChatTemplate = None,
    data: options.Data = None,
    data_revision: options.DataRevision = None,
    allow_data_mismatch: options.DataMismatch = None,
    max_prompt_tokens: options.MaxPromptTokens = None,
    multi_turn: options.MultiTurn = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    judge_key_env: options.JudgeKeyEnv = None,
    judge_mode: options.JudgeMode = None,
    judge_key: options.JudgeKey = None,
    unsafe_run_code: options.UnsafeRunCode = None,
    interval: options.Interval = None,
    compress: options.Compress = None,
    prefill: options.Prefill = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attn: options.Attn = None,
    slots: options.Slots = None,
    batch_size: options.BatchSize = None,
    prefill_chunk: options.PrefillChunk = None,
    out: options.Out = "results",
    run_name: options.RunName = None,
    resume: options.Resume = None,
    dry_run: options.DryRun = False,
    keep_prompts: options.KeepPrompts = None,
    allow_version_change: options.VersionChange = False,
    take_over: options.TakeOver = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run methods at budgets on tasks: every method at every budget on every task, on the same questions."""
    problems = Problems()
    with problems.collect():
        refuse_key(judge_key)
    gathered = _gather(context.params, problems)
    with problems.collect():
        _check_names(run_name, resume)
    chosen = _choose(gathered, Path(out), resume, problems) if gathered else None
    found = _describe(chosen, gathered, problems)
    if chosen is not None:
        check(chosen, found, problems, duplicates=allow_duplicate_samples)
    if not dry_run and not problems.errors:
        with problems.collect():
            check_out(out)
    problems.stop()
    assert gathered is not None
    assert chosen is not None
    _notes(gathered, quiet=quiet, verbose=verbose, resumed=resume is not None)

    from kvbench.run import execute

    with hub.only(asked(chosen, gathered) if resume is not None else None):
        result = execute(
            chosen,
            out=Path(out),
            run_name=resume or run_name,
            resume=resume is not None,
            dry_run=dry_run,
            progress=Progress(quiet=quiet),
            allow_version_change=allow_version_change,
            take_over=take_over,
            sources=gathered.record(),
            command=sys.argv,
        )
    if result.run_dir is None and not (json or quiet):
        _print_plan(result)
    elif result.run_dir is not None:
        report_on(result.run_dir, quiet=quiet)
    failed = sum(result.failed.values())
    if json:
        folder = None if result.run_dir is None else str(result.run_dir)
        counts = {"rows_done": result.done, "rows_planned": result.planned, "failed": dict(result.failed)}
        plan = {"plan": _plan(result)} if result.run_dir is None else {}
        terminal.data({"run": folder, "hash": chosen.hash(), **counts, **plan})
    if result.run_dir is not None and (failed or result.done < result.planned):
        reasons = ", ".join(f"{count} {status}" for status, count in result.failed.items())
        again = f"'{resume_command(result.run_dir)}' tries them again"
        missing = result.planned - result.done + failed
        raise IncompleteError(f"{missing} of {result.planned} rows have no score ({reasons or 'not run'}); {again}.")


def _gather(params: Mapping[str, Any], problems: Problems) -> Gathered | None:
    flags = {key: params.get(key) for key in KEYS}
    for text in unknown_variables(os.environ):
        problems.warn(text)
    config = params.get("config")
    with problems.collect():
        if params.get("batch_size") is not None:
            if params.get("slots") is not None:
                raise UserError("--slots and --batch-size are one setting; give one of them.")
            flags["slots"] = Given(params["batch_size"], "--batch-size")
        return gather(flags, os.environ, params.get("suite"), Path(config) if config else None)
    return None


def _check_names(run_name: str | None, resume: str | None) -> None:
    for name, option in ((run_name, "--run-name"), (resume, "--resume")):
        if name is not None:
            check_run_name(name, option)
    if run_name is not None and resume is not None and run_name != resume:
        raise UserError(f"--resume {show(resume)} and --run-name {show(run_name)} name two runs; give one of them.")


def _choose(gathered: Gathered, out: Path, resume: str | None, problems: Problems) -> RunConfig | None:
    """The settings typed, or those of the run to continue."""
    if resume is None:
        return build(gathered, problems)
    if not problems.errors:
        with problems.collect():
            typed = ["kvbench", "run", "--resume", resume, *([] if out == Path(OUT) else ["--out", str(out)])]
            return continued(out, resume, gathered, command=typed)
    return None


def _plan(result: RunResult) -> list[dict[str, Any]]:
    """What would run, cell by cell."""
    return [
        {
            "task": p.cell.task,
            "method": p.cell.method.label,
            "budget": None if p.cell.budget is None else label(p.cell.budget),
            "rows": len(p.rows),
            "slots": p.plan.slots,
            "entries": p.plan.entries_peak,
            "slot_bytes": p.plan.slot_bytes,
            "tokens_per_second_at_most": p.plan.limit,
        }
        for p in result.plans
    ]


def _print_plan(result: RunResult) -> None:
    """What would run: cells with rows, slots, memory and the speed that the hardware allows."""
    numbers = ("rows", "slots", "entries", "a slot", "tok/s at most")
    table = terminal.grid("task", "method", "budget", *numbers, right=("budget", *numbers))
    for p in _plan(result):
        sizes = (str(p[name]) for name in ("rows", "slots", "entries"))
        speed = f"{p['tokens_per_second_at_most']:,.0f}"
        table.add_row(p["task"], p["method"], p["budget"] or "-", *sizes, size(p["slot_bytes"]), speed)
    terminal.console().print(table)
    print(f"{result.planned} rows; nothing was run.")


def report_on(run_dir: Path, *, quiet: bool) -> None:
    """Print the tables of a run and write them into its folder."""
    from kvbench.report.load import load
    from kvbench.report.render import Report, text, write

    report = Report.make(load([run_dir]))
    paths = write(report, run_dir / "report")
    if not quiet:
        print(text(report))
        terminal.note(f"rows are in {run_dir}, this report in {paths[0]}.")


def _describe(chosen: RunConfig | None, gathered: Gathered | None, problems: Problems) -> ModelInfo | None:
    """The model, also when the grid is wrong, so that both problems are shown."""
    given = gathered.first("model") if gathered else None
    name = chosen.model if chosen else str(given.value).strip() if given else TINY
    revision = chosen.revision if chosen else None
    if holds_secret(name):  # `build` has said so, without the name
        return None
    with problems.collect():
        return describe(name, revision)
    return None


def _notes(gathered: Gathered, *, quiet: bool, verbose: bool, resumed: bool) -> None:
    if gathered.first("model") is None and not resumed and not quiet:
        terminal.note(
            "no --model given: using the built-in model 'tiny' (for demos and CI). Give --model for real numbers."
        )
    if verbose:
        for key, values in gathered.record().items():
            strongest: Mapping[str, Any] = values[-1]
            terminal.note(f"{key} = {strongest['value']!r} from {strongest['source']}")
