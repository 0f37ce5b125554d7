"""``kvbench replay``: lets methods read finished answers again, and compares their predictions with the full cache's.
With ``--analysis`` the command analyses the methods' caches and the model's attention instead.

The command makes its checks first. Then `kvbench.replay` does the work and imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import registry
from kvbench.cli.checks import check
from kvbench.cli.commands.show import one_run
from kvbench.cli.options import Plugins, Text, Texts, declare, option, takes
from kvbench.cli.replayed_run import inputs_of, named, of_run, unscored
from kvbench.cli.request import build
from kvbench.config.layers import Given, gather
from kvbench.config.parsers import parse, split
from kvbench.config.plugins import load_plugins
from kvbench.config.run_config import RunConfig
from kvbench.config.settings import PARSERS
from kvbench.console import signals, terminal
from kvbench.console.problems import Problems
from kvbench.console.redact import redact_argv
from kvbench.errors import UserError, quote
from kvbench.eviction import choose
from kvbench.replay.analyses.api import Analysis, AttentionAnalysis, analyses
from kvbench.replay.analyses.api import choose as choose_analyses
from kvbench.replay.work import Readings, Work, check_evictions
from kvbench.report import plots
from kvbench.sources import adapters, hub
from kvbench.sources.models import TINY, describe
from kvbench.sources.models import revision as revision_of
from kvbench.store import check_out

if TYPE_CHECKING:
    from kvbench.replay.choices import LeftOut
    from kvbench.replay.session import Session

EPILOG = f"""Examples:
  kvbench replay --method all --budget 32,64 --task chain,walk
  kvbench replay --method gkv,rkv --budget 48 --interval 32 --task walk --limit 16 --json
  kvbench replay --method golden --method-opt golden.within=mean --budget 32 --task chain
  kvbench replay --method h2o,snapkv --budget 25% --run results/first --out replayed
  kvbench replay --suite foresightkv-table2 --out table2
  kvbench replay --analysis overlap,sparsity --task walk --out looked
  kvbench replay --analysis tokens --method gkv,rkv --budget 64 --task walk --limit 1 --out looked

Analyses:
{chr(10).join(f"  {name}: {kind.about}" for name, kind in analyses().items())}
"""
ALL = "all"
LIMIT = "64"  # answers per task
KEPT = "interrupted: finished parts are kept in {out}; the same command continues from there."

OWN = (
    option(
        "method",
        Texts,
        "Methods, repeatable or with commas; all: every method that can run.",
        metavar="NAME",
        short="-m",
    ),
    option(
        "run",
        Text,
        "Read the answers that this run generated with the full cache, instead of new ones. Model and tasks are those "
        "of the run.",
        metavar="RUN",
    ),
    declare("plugin", Plugins),
    option("limit", Text, f"Number of answers per task. Default: {LIMIT}; with --run all.", metavar="N"),
    option(
        "analysis",
        Texts,
        "Analyses to make instead of the comparison, repeatable or with commas; listed below.",
        metavar="NAME",
    ),
    option("sample", Text, "With --analysis: only the answer to this question.", metavar="ID"),
    option(
        "out",
        Text,
        "Folder for tables (CSV, Parquet), figures and JSON. If a replay is interrupted, the same command continues "
        "it there.",
        metavar="DIR",
    ),
)
OF_RUN = (
    *("budget", "task", "method_opt", "protect", "task_file", "chat_template", "model", "revision", "adapter"),
    *("seed", "max_new_tokens", "suite", "config", "stop", "interval", "data", "device", "dtype", "json", "quiet"),
)


@takes(*OWN, *OF_RUN)
def replay(typed: Mapping[str, Any]) -> None:
    """Compare methods token by token on finished answers: how much eviction raises the loss, without any sampling.

    The model answers each question once with the full cache. Every method then reads the same answers with its own
    cache and evicts when a run would; its predictions are compared with the full cache's. 'random' and the oracle
    'golden' are always compared too: tables show which share of the gap between their losses each method closes.
    With --analysis the command makes tables and figures instead: where attention goes, and which entries methods keep.
    """
    if given := gather({"plugin": typed["plugin"]}, os.environ).typed("plugin"):
        load_plugins(parse(given.source, PARSERS["plugin"], given.value))
    problems, quiet = Problems(), bool(typed["quiet"])
    run, limit, out = (typed[name] for name in ("run", "limit", "out"))
    kinds = _kinds(typed, problems)
    if out is not None and any(kind.plotted for kind in kinds):
        with problems.collect():
            plots.check()
    problems.stop()
    alone = bool(kinds) and all(issubclass(kind, AttentionAnalysis) for kind in kinds)
    names = ["full"] if alone else _names(typed, problems)
    problems.stop()
    listed = [name for name in names if name != ALL]
    config = _config(typed, [*listed, *(registry.methods.names() if ALL in names else [])], problems)
    if config is not None and ALL in names and not config.budgets:
        problems.errors.append(UserError("--budget is missing. Example: --budget 512."))
    if config is not None and kinds and not alone and len(config.intervals) > 1:
        several = ", ".join(map(str, config.intervals))
        problems.errors.append(UserError(f"--analysis takes a single interval, not {several}. Give --interval."))
    problems.stop()
    assert config is not None
    most = parse("--limit", PARSERS["limit"], limit) if limit is not None else None
    asked = Work(
        named=[m for m in config.methods if m.name in listed or ALL not in names],
        run=run,
        most=most,
        kinds=kinds,
        sample=typed["sample"],
        out=None if out is None else Path(out),
    )
    if not alone:
        with problems.collect():
            check_evictions(config, run)
    _check(config, problems)
    if typed["model"] is None and config.model == TINY and run is None and not quiet:
        terminal.note(f"no --model given: using the built-in model {quote(config.model)}.")

    progress = Readings(quiet=quiet)
    progress.prepare("loading torch and transformers")
    try:
        from kvbench.replay.output import LEGEND, show_analysis, show_published, show_result, write, write_analyses
        from kvbench.replay.parts import FOLDER
        from kvbench.replay.published import beside

        folder = None if out is None else check_out(out)

        def interrupted() -> str:
            return KEPT.format(out=quote(folder)) if folder and (folder / FOLDER).is_dir() else signals.AGAIN

        with hub.only(None if run is None else named(config, typed["task"])), signals.phase(interrupted):
            session = _work(config, asked, progress)
    finally:
        progress.end()
    results, found, left_out = session.results, session.rows, session.left_out
    document = _document(config, asked, left_out)
    if kinds:
        document = {"analyses": {kind.name: rows for kind, rows in found.items()}} | document
    else:
        rows = [row for result in results for row in result.rows]
        printed = beside(config.model, rows)
        document = {"rows": rows, "published": printed} | document
    if out is not None:
        folder = write_analyses(out, found, document) if kinds else write(out, results, document)
        session.parts.remove()
        terminal.note(f"tables are in {folder}.")
    if not quiet:
        for result in results:
            show_result(result)
        if results:
            print(LEGEND)
        if not kinds and printed:
            show_published(printed)
        for kind, rows in found.items():
            show_analysis(kind, rows)
        for left in left_out:
            at = "" if left.budget is None else f" at {left.budget}"
            terminal.note(f"left out: {left.method}{at}: {left.reason}")
    if typed["json"]:
        terminal.data(document)


def _kinds(typed: Mapping[str, Any], problems: Problems) -> list[type[Analysis]]:
    """Return the analyses that --analysis names; none if it was not given.

    Two things are errors: --sample without --analysis; and an option about methods or budgets, if all analyses use only
    the full cache. Errors go to `problems`.
    """
    with problems.collect():
        if not (given := typed["analysis"]):
            if typed["sample"] is not None:
                raise UserError("--sample is given without --analysis. Add an analysis, as in --analysis tokens.")
            return []
        kinds = choose_analyses([str(name) for name in split("--analysis", given, "Example: --analysis overlap.")])
        if all(issubclass(kind, AttentionAnalysis) for kind in kinds):
            for key in ("method", "budget", "method_opt", "protect", "interval"):
                if typed[key]:
                    names = ",".join(kind.name for kind in kinds)
                    flag = f"--{key.replace('_', '-')}"
                    raise UserError(f"{flag} cannot be given with --analysis {names}, which uses the full cache only.")
        return kinds
    return []


def _has_methods(typed: Mapping[str, Any]) -> bool:
    """Return whether the suite or the config file names methods. Raises UserError for a file that cannot be read."""
    gathered = gather({}, {}, typed["suite"], typed["config"])
    return gathered.first("method") is not None or any("method" in block for block in gathered.blocks)


def _names(typed: Mapping[str, Any], problems: Problems) -> list[str]:
    """Return the methods that --method or its environment variable names; none if a suite or a file names them. Errors
    go to `problems`."""
    with problems.collect():
        given = gather({"method": typed["method"]}, os.environ).typed("method")
        if given is None and _has_methods(typed):
            return []
        if given is None:
            raise UserError("--method is missing. Give a method name, or all; 'kvbench list methods' shows them.")
        names = dict.fromkeys(str(name).strip() for name in split(given.source, given.value, "Example: --method all."))
        return [ALL if name.lower() == ALL else choose.canonical(name) for name in names]
    return []


def _config(typed: Mapping[str, Any], methods: list[str], problems: Problems) -> RunConfig | None:
    """Return the configuration that the options describe; with --run, it is the run's configuration, changed by the
    options. None after an error; errors go to `problems`."""
    if typed["run"] is None:
        with problems.collect():
            flags = {**typed, "method": methods, "plugin": None}  # plug-ins are loaded already
            gathered = gather(flags, os.environ, typed["suite"], typed["config"])
            if gathered.first("limit") is None:
                gathered.flags["limit"] = Given(LIMIT, "--limit")
            return build(gathered, problems)
        return None
    with problems.collect():
        return of_run({**typed, "method": methods}, problems)
    return None


def _check(config: RunConfig, problems: Problems) -> None:
    """Check the configuration as `kvbench run` does, without judge, sandbox and methods. Replay needs no judge and no
    sandbox; `kvbench.replay.choices` checks the methods."""
    with problems.collect():
        info = describe(config.model_place, config.revision)
        grids = tuple(dataclasses.replace(grid, methods=()) for grid in config.grids)
        # A replay generates one answer to each question, and the answers of a run exist already.
        check(unscored(dataclasses.replace(config, grids=grids)), info, problems, duplicates=True)
    problems.stop()


def _work(config: RunConfig, asked: Work, progress: Readings) -> Session:
    """Let the methods read the answers. Return the session with its results."""
    from kvbench.replay.session import Session

    progress.prepare("reading the model's configuration and the prompts")
    folder = one_run(asked.run, Path("results")) if asked.run is not None else None
    inputs = inputs_of(config, folder)
    session = Session(config, inputs, asked, folder, progress)
    progress.prepare("loading the model's weights")
    session.run()
    return session


def _document(config: RunConfig, asked: Work, left_out: list[LeftOut]) -> dict[str, Any]:
    from kvbench.runner import env

    return {
        "left_out": [dataclasses.asdict(left) for left in left_out],
        "model": config.model,
        "model_revision": revision_of(describe(config.model_place, config.revision)),
        "adapter": adapter.identity if (adapter := adapters.find(config.adapter)) else None,
        "run": asked.run,
        "settings": {
            "interval": config.intervals[0] if len(config.intervals) == 1 else list(config.intervals),
            "limit": config.limit if asked.run is None else asked.most,
            "seed": config.seed,
            "device": config.device,
            "dtype": config.dtype,
            "max_new_tokens": config.max_new_tokens,
        },
        "versions": env.versions(),
        "git": env.git_commit(),
        "command": redact_argv(sys.argv[1:]),
    }
