"""Starts a run: gathers settings, checks them, and calls `kvbench.runner.execute`, which imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.checks import check, check_inputs, refuse_key
from kvbench.cli.continued import asked, continued
from kvbench.cli.placed import placement, slurm_script
from kvbench.cli.request import build
from kvbench.config.layers import Gathered, Given, gather, unknown_variables
from kvbench.config.parsers import parse
from kvbench.config.run_config import RunConfig
from kvbench.console import signals, terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import Progress, size
from kvbench.console.redact import holds_secret
from kvbench.errors import IncompleteError, UserError, counted, quote
from kvbench.eviction.budget import label
from kvbench.runner.shard import Shard, parse_shard
from kvbench.sources import hub
from kvbench.sources.models import TINY, ModelInfo, describe
from kvbench.store import FINAL, check_run_name, check_same, check_writable, manifest

if TYPE_CHECKING:
    from kvbench.runner.execute import RunResult

LIMIT = (
    "tok/s at most: the limit that this machine's memory and arithmetic set, measured in 0.1 s; it varies with the "
    "load of the machine. A run reaches only a part of this limit."
)


def start(params: Mapping[str, Any]) -> None:
    """Run what the user typed. All checks that do not need torch come before its import."""
    resume, quiet = params["resume"], bool(params["quiet"])
    placed = placement(params)
    chosen, gathered, shard = _checked(params)
    if params["print_sbatch"]:
        print(slurm_script(params, placed, chosen, gathered))
        return
    if chosen.device_map == "auto":
        placed = placed.alone()
    with hub.only(asked(chosen, gathered) if resume is not None else None):
        check_inputs(chosen)
        _notes(gathered, quiet=quiet, verbose=params["verbose"], resumed=resume is not None)

        progress = Progress(quiet=quiet)
        progress.prepare("loading torch and transformers")
        try:
            from kvbench.runner.execute import execute

            result = execute(
                chosen,
                out=Path(params["out"]),
                run_name=resume or params["run_name"],
                resume=resume is not None,
                shard=shard,
                dry_run=params["dry_run"],
                progress=progress,
                allow_version_change=params["allow_version_change"],
                take_over=params["take_over"],
                sources=gathered.record(),
                command=sys.argv,
                placement=placed,
            )
        finally:
            progress.end()
    _tell(result, chosen, quiet=quiet, json=params["json"])


def _checked(params: Mapping[str, Any]) -> tuple[RunConfig, Gathered, Shard | None]:
    """Check what the user typed; return the run's configuration, its settings with their sources, and its shard.

    Raises one error that lists all problems. Without problems, `check_same` then compares the run's folder with the
    configuration, except in a dry run and with --resume.
    """
    resume, run_name, out, dry = params["resume"], params["run_name"], Path(params["out"]), params["dry_run"]
    problems = Problems()
    with problems.collect():
        refuse_key(params["judge_key"])
    shard = None
    with problems.collect():
        shard = None if params["shard"] is None else parse("--shard", parse_shard, params["shard"])
    gathered = _gather(params, problems)
    with problems.collect():
        _check_names(run_name, resume)
    chosen = _choose(gathered, out, resume, problems) if gathered else None
    model = _describe(chosen, gathered, problems)
    if chosen is not None:
        check(chosen, model, problems, duplicates=params["allow_duplicate_samples"] or resume is not None)
    if not dry and not problems.errors:
        with problems.collect():
            check_writable(params["out"])
    problems.stop()
    assert gathered is not None
    assert chosen is not None
    if not dry and resume is None:
        name = (run_name or chosen.run_name()) + (shard.suffix if shard else "")
        chosen = _in_order_of(out, name, chosen)
        check_same(out, name, chosen.stored())
    return chosen, gathered, shard


def _in_order_of(out: Path, name: str, chosen: RunConfig) -> RunConfig:
    """Return the configuration with the grids of the run `name`, if that run exists and has the same cells and
    settings. The run thus keeps the order of its cells when the user gives its methods in another order."""
    if not os.path.lexists(out / name / manifest.NAME):
        return chosen
    record = manifest.read(out / name)
    # After an error in the recorded settings, `check_same` shows how they differ.
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
        recorded = RunConfig.from_dict(record["config"])
        if recorded.hash() == chosen.hash():
            return dataclasses.replace(chosen, grids=recorded.grids)
    return chosen


def _tell(result: RunResult, chosen: RunConfig, *, quiet: bool, json: bool) -> None:
    """Print the plan of a dry run, or the tables of a run.

    json: also print a JSON document as the last line; for a dry run it replaces the table of the plan. quiet: print no
    tables. Raises IncompleteError if rows of the run are missing or failed (`check_scored`).
    """
    if result.run_dir is None and not (json or quiet):
        _print_plan(result)
    elif result.run_dir is not None:
        if not result.planned:
            terminal.note(f"{quote(result.run_dir)} has no rows: the run has more shards than questions in its cells.")
        elif result.repeated and not quiet:
            rows = "its row was" if result.planned == 1 else f"all {result.planned} rows were"
            terminal.note(f"nothing was run for {quote(result.run_dir)}: {rows} there already.")
        if result.planned:
            report_on(result.run_dir, quiet=quiet)
    if json:
        folder = None if result.run_dir is None else str(result.run_dir)
        counts = {"rows_done": result.done, "rows_planned": result.planned, "failed": dict(result.failed)}
        plan = {"plan": _plan(result)} if result.run_dir is None else {}
        terminal.data({"run": folder, "hash": chosen.hash(), **counts, **plan})
    if result.run_dir is not None:
        check_scored(result.again, result.planned, result.done, result.failed)


def check_scored(again: str, planned: int, done: int, failed: Mapping[str, int], why: str = "") -> None:
    """Raise IncompleteError if rows of a run are missing or failed. again: the command that continues the run. planned,
    done: numbers of rows; rows that are planned and not done are missing. failed: the number of failed rows by status,
    without rows that only wait for a score. why: the beginning of the message."""
    not_run = max(0, planned - done)
    lacking = dict(failed) | ({"not run": not_run} if not_run else {})
    if lacking:
        reasons = ", ".join(f"{count} {status}" for status, count in lacking.items())
        count = sum(lacking.values())
        have = f"{count} of {counted(planned, 'row')} {'has' if count == 1 else 'have'} no score"
        raise IncompleteError(f"{why}{have} ({reasons}); {_again(again, lacking)}.")


def _again(command: str, lacking: Iterable[str]) -> str:
    """Return the last clause of an error: whether another attempt can score the rows that have no score. command: the
    command that continues the run. lacking: the statuses of these rows."""
    statuses = {*lacking}
    if statuses <= {*FINAL}:
        return "no other attempt can answer them"
    which = "them" if statuses.isdisjoint(FINAL) else "those that fit"
    return f"'{command}' tries {which} again"


def report_on(run_dir: Path, *, quiet: bool) -> None:
    """Write the tables of a run into its folder and, unless `quiet`, print them."""
    from kvbench.report.load import load
    from kvbench.report.render import text, write
    from kvbench.report.scores import ScoreReport

    with signals.phase(lambda: f"interrupted: all rows are saved; 'kvbench report {run_dir}' makes the tables."):
        report = ScoreReport.make(load([run_dir]))
        paths = write(report, run_dir / "report")
    if not quiet:
        print(text(report))
        terminal.note(f"rows are in {run_dir}, this report in {paths[0]}.")


def _gather(params: Mapping[str, Any], problems: Problems) -> Gathered | None:
    flags = dict(params)
    for text in unknown_variables(os.environ):
        problems.warn(text)
    with problems.collect():
        if params["batch_size"] is not None:
            if params["slots"] is not None:
                raise UserError("--slots and --batch-size are one setting; give one of them.")
            flags["slots"] = Given(params["batch_size"], "--batch-size")
        return gather(flags, os.environ, params["suite"], params["config"])
    return None


def _check_names(run_name: str | None, resume: str | None) -> None:
    for name, option in ((run_name, "--run-name"), (resume, "--resume")):
        if name is not None:
            check_run_name(name, option)
    if run_name is not None and resume is not None and run_name != resume:
        raise UserError(f"--resume {quote(resume)} and --run-name {quote(run_name)} name two runs; give one of them.")


def _choose(gathered: Gathered, out: Path, resume: str | None, problems: Problems) -> RunConfig | None:
    """Return the settings that the user gave or, with --resume, the settings of the run to continue. None after an
    error."""
    if resume is None:
        return build(gathered, problems)
    if not problems.errors:
        with problems.collect():
            return continued(out, resume, gathered)
    return None


def _plan(result: RunResult) -> list[dict[str, Any]]:
    """Return the plan of a dry run for the JSON document, one dictionary per cell."""
    return [
        {
            "task": p.cell.task,
            "method": p.cell.method.label,
            "budget": None if p.cell.budget is None else label(p.cell.budget),
            "interval": p.interval if p.cell.method.evicts else None,
            "rows": len(p.rows),
            "slots": p.plan.slots,
            "entries": p.plan.entries_peak,
            "slot_bytes": p.plan.slot_bytes,
            "tokens_per_second_at_most": p.plan.limit,
            "longest_answers_tokens": (tokens := sum(row.prompt.max_new_tokens for row in p.rows)),
            "hours_of_longest_answers": tokens / p.plan.limit / 3600,
        }
        for p in result.plans
    ]


def _print_plan(result: RunResult) -> None:
    """Print the plan of a dry run: for each cell its rows, slots and memory, and the speed that the hardware allows."""
    plan = _plan(result)
    several = ["interval"] if len({p["interval"] for p in plan} - {None}) > 1 else []
    numbers = ("budget", *several, "rows", "slots", "entries", "a slot", "tok/s at most")
    rows = []
    for p in plan:
        counts = (str(p[name] or "-") for name in ("budget", *several))
        sizes = (str(p[name]) for name in ("rows", "slots", "entries"))
        speed = f"{float(format(p['tokens_per_second_at_most'], '.2g')):,.10g}"  # measured to about one digit
        rows.append((p["task"], p["method"], *counts, *sizes, size(p["slot_bytes"]), speed))
    terminal.table(("task", "method", *numbers), rows, right=numbers)
    print(LIMIT)
    tokens, hours = (sum(p[name] for p in plan) for name in ("longest_answers_tokens", "hours_of_longest_answers"))
    print(f"If every answer had its maximum length: {tokens:,} tokens, {_time(hours)} of one device at the limit.")
    print(f"{counted(result.planned, 'row')}; nothing was run.")


def _time(hours: float) -> str:
    """Return a time as text with two significant digits, in hours, minutes or seconds: "3.4 hours", "12 minutes"."""
    size, unit = next(((s, u) for s, u in ((1.0, "hours"), (1 / 60, "minutes")) if hours >= s), (1 / 3600, "seconds"))
    return f"{float(format(hours / size, '.2g')):,.10g} {unit}"


def _describe(chosen: RunConfig | None, gathered: Gathered | None, problems: Problems) -> ModelInfo | None:
    """Return what is known about the model; None after an error.

    chosen: the settings; None if they have errors. Without them, the model is looked up by the name in `gathered`, so
    that an error about the model is listed together with the other errors.
    """
    given = gathered.first("model") if gathered else None
    name = chosen.model_place if chosen else str(given.value).strip() if given else TINY
    revision = chosen.revision if chosen else None
    if holds_secret(name):  # `build` reported it, without the name
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
