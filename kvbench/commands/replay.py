"""``kvbench replay``: methods read finished answers again, and what they predict is compared with the full cache.

Checks come first; `kvbench.replay` does the work and imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench import registry, terminal
from kvbench.budget import label
from kvbench.commands import options
from kvbench.commands.checks import check
from kvbench.commands.request import build, resumed
from kvbench.commands.show import one_run
from kvbench.config import PARSERS, Grid, MethodChoice, RunConfig
from kvbench.errors import UserError, show
from kvbench.eviction import choose
from kvbench.models import describe
from kvbench.models import revision as revision_of
from kvbench.plugins import load_plugins
from kvbench.problems import Problems
from kvbench.progress import Progress
from kvbench.settings import Gathered, gather
from kvbench.values import parse, split

if TYPE_CHECKING:
    from kvbench.replay.plan import LeftOut
    from kvbench.replay.replay import Result

EPILOG = """Examples:
  kvbench replay --method all --budget 32,64 --task chain,walk
  kvbench replay --method gkv,rkv --budget 48 --interval 32 --task walk --limit 16 --json
  kvbench replay --method golden --method-opt golden.within=max --budget 32 --task chain
  kvbench replay --method h2o,snapkv --budget 25% --run results/first --out replayed
"""
ALL = "all"
LIMIT = "64"  # answers of each task
SETTINGS = (
    "method",
    "budget",
    "task",
    "method_opt",
    "model",
    "revision",
    "limit",
    "seed",
    "interval",
    "max_new_tokens",
)

Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        help="Methods, repeatable or with commas; all: every one that can run.",
        show_default=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Answers that the full cache wrote in this run, instead of new ones; model and tasks are the run's.",
        show_default=False,
    ),
]
Limit = Annotated[str | None, typer.Option("--limit", metavar="N", help=f"Answers of each task. Default: {LIMIT}.")]
Folder = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Write tables (CSV, Parquet) and JSON there.", show_default=False),
]


def replay(
    context: typer.Context,
    method: Methods = None,
    budget: options.Budget = None,
    task: options.TaskName = None,
    run: Run = None,
    method_opt: options.MethodOpt = None,
    plugin: options.Plugins = None,
    model: options.Model = None,
    revision: options.Revision = None,
    limit: Limit = None,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = None,
    interval: options.Interval = None,
    data: options.Data = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: Folder = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare methods token by token on answers that are given: the loss that eviction adds, without any sampling.

    The model answers each question once with the full cache. Every method then reads the same answers with its own
    cache, evicting when a run would, and its predictions are compared with the full cache's. The oracle 'golden' and
    'random' are always among them: how much of the way from one to the other does a method come?
    """
    load_plugins(plugin or [])
    problems = Problems()
    flags = dict(context.params) | {"limit": limit or LIMIT}
    names = _names(method, problems)
    problems.stop()
    typed = [name for name in names if name != ALL]
    config = _config(flags, [*typed, *(registry.methods.names() if ALL in names else [])], run, problems)
    if config is not None and ALL in names and not config.budgets:
        problems.errors.append(UserError("--budget is missing. Example: --budget 512."))
    problems.stop()
    assert config is not None
    most = parse("--limit", PARSERS["limit"], limit) if limit is not None else None
    named = [m for m in config.methods if m.name in typed]
    every = [m for m in config.methods if m.name not in typed]
    _check(config, problems)
    if model is None and run is None and not quiet:
        terminal.note(f"no --model given: using the built-in model {show(config.model)}.")

    from kvbench.replay.output import write

    results, left_out = _work(config, named, every, run, most, _Readings(quiet=quiet))
    document = _document(config, results, left_out, run, most)
    if out is not None:
        folder = write(out, results, document)
        terminal.note(f"tables are in {folder}.")
    if not quiet:
        for result in results:
            _print(result)
        for left in left_out:
            at = "" if left.budget is None else f" at {left.budget}"
            terminal.note(f"left out: {left.method}{at}: {left.reason}")
    if json:
        terminal.data(document)


def _names(given: list[str] | None, problems: Problems) -> list[str]:
    with problems.collect():
        if not given:
            raise UserError("--method is missing. Give a method name, or all; 'kvbench list methods' shows them.")
        names = dict.fromkeys(str(name).strip() for name in split("--method", given, "Example: --method all."))
        return [ALL if name.lower() == ALL else choose.canonical(name) for name in names]
    return []


def _config(flags: Mapping[str, Any], methods: list[str], run: str | None, problems: Problems) -> RunConfig | None:
    """What was asked for as a run's configuration; of a run, its own with the methods and budgets that were given."""
    typed = {key: flags.get(key) for key in (*SETTINGS, "data", "device", "dtype")} | {"method": methods}
    if run is None:
        return build(gather(typed, os.environ), problems)
    with problems.collect():
        return _of_run(typed, run, problems)
    return None


def _of_run(typed: dict[str, Any], run: str, problems: Problems) -> RunConfig | None:
    for key in ("model", "revision", "seed", "max_new_tokens"):
        if typed[key] is not None:
            raise UserError(f"--{key.replace('_', '-')} cannot be given with --run: the run's answers decide it.")
    folder = one_run(run, Path("results"))
    config = resumed(folder.parent, folder.name, Gathered([], {}, {}), problems)
    asked = build(gather(typed | {"task": typed["task"] or list(config.tasks)}, os.environ), problems)
    if asked is None:
        return None
    if strange := [task for task in asked.tasks if task not in config.tasks]:
        raise UserError(f"run {show(folder.name)} has no task {show(strange[0])}. It has {', '.join(config.tasks)}.")
    grids = (dataclasses.replace(g, tasks=(t,), limit=config.limit_for(t)) for g in asked.grids for t in g.tasks)
    own: dict[str, Any] = {
        "grids": tuple(grids),
        "data": asked.data or config.data,
        "device": asked.device,
        "dtype": asked.dtype if typed["dtype"] else config.dtype,
        "interval": asked.interval if typed["interval"] else config.interval,
    }
    return dataclasses.replace(config, **own)


def _check(config: RunConfig, problems: Problems) -> None:
    """What a run would refuse too, apart from methods: `kvbench.replay.plan` checks these."""
    with problems.collect():
        info = describe(config.model, config.revision)
        grids = tuple(Grid(methods=(), tasks=g.tasks, budgets=g.budgets, limit=g.limit) for g in config.grids)
        check(_unscored(dataclasses.replace(config, grids=grids)), info, problems)
    problems.stop()


def _unscored(config: RunConfig) -> RunConfig:
    """Nothing is scored here, so neither a judge nor a sandbox is needed."""
    return dataclasses.replace(config, judge="none", unsafe_run_code=True)


def _work(
    config: RunConfig,
    named: list[MethodChoice],
    every: list[MethodChoice],
    run: str | None,
    most: int | None,
    progress: _Readings,
) -> tuple[list[Result], list[LeftOut]]:
    """most: answers of a run's task that are taken."""
    from kvbench.engine.model import load, pick_device
    from kvbench.engine.plan import read_shape, use_threads
    from kvbench.prepare import prepare
    from kvbench.replay.plan import Target, plan
    from kvbench.replay.replay import replay as compare
    from kvbench.replay.traces import own, stored

    ready = prepare(_unscored(config), terminal.warning)
    shape = read_shape(ready.config)
    longest = {name: max(p.max_tokens for p in work.prompts) for name, work in ready.works.items()}
    target = Target(shape.geometry, ready.config, ready.info.folder, max(longest.values()))
    chosen, left_out = plan(named, every, config.budgets, target)
    use_threads(shape, pick_device(config.device))
    loaded = load(ready.where, revision=config.revision, device=config.device, dtype=config.dtype)
    results = []
    try:
        for name, work in ready.works.items():
            if run is None:
                progress.task(f"{name}, answering", len(work.prompts), "answers")
                traces = own(work, loaded, config.seed, terminal.warning, progress.next)
            else:
                folder = one_run(run, Path("results"))
                traces = stored(folder, work, loaded.tokenizer, ready.context, config.seed, terminal.warning)
                traces = traces[:most]
            progress.end()
            progress.task(name, len(traces) * len(chosen), "readings")
            settings = {"interval": config.interval, "max_tokens": longest[name]}
            results.append(compare(loaded, name, traces, chosen, **settings, tick=progress.next))
            progress.end()
    finally:
        progress.end()
    return results, left_out


class _Readings(Progress):
    """Answers read by methods instead of rows, and no cache."""

    _name = _unit = ""

    def task(self, name: str, total: int, unit: str) -> None:
        self._name, self._unit, self._words, self._cell = name, unit, 0, ""
        self.begin(total, 0)

    def next(self, text: str, traces: int, tokens: int) -> None:
        self._words += tokens
        self.cell(text)
        self.update(self._done + traces, self._words, kv_bytes_now=0, kv_bytes_peak=0)

    def line(self) -> str:
        parts = [f"{self._done}/{self._total} {self._unit}", self._name, self._cell, self._speed, self._left()]
        return "  ".join(part for part in parts if part)


def _document(
    config: RunConfig, results: list[Result], left_out: list[LeftOut], run: str | None, most: int | None
) -> dict[str, Any]:
    from kvbench import env

    return {
        "rows": [row for result in results for row in result.rows],
        "left_out": [dataclasses.asdict(left) for left in left_out],
        "model": config.model,
        "model_revision": revision_of(describe(config.model, config.revision)),
        "run": run,
        "settings": {
            "interval": config.interval,
            "limit": config.limit if run is None else most,
            "seed": config.seed,
            "device": config.device,
            "dtype": config.dtype,
            "max_new_tokens": config.max_new_tokens,
        },
        "versions": env.versions(),
        "git": env.git_commit(),
        "command": sys.argv[1:],
    }


def _print(result: Result) -> None:
    """One table a task: without a budget first, then budget by budget, the smallest loss ratio first."""
    plus_minus = "+-" if terminal.ascii_only() else "±"
    first = result.rows[0]
    count = f"{first['traces']} answers, {first['tokens']} tokens, interval {first['interval']}"
    print(f"{terminal.clean(first['task'])}: {count}; loss of the full cache {first['loss_full']:.3g} nats a token\n")
    numbers = (
        "budget",
        "loss ratio",
        "loss +",
        "low",
        "high",
        "KL",
        "top-1",
        "cosine",
        "mass lost",
        "overlap",
        "gap closed",
    )
    table = terminal.grid("method", *numbers, "entries", right=(*numbers, "entries"))
    for row in result.rows:
        size = row["budget"] or (label(row["budget_share"]) if row["budget_share"] else "-")
        mark = "" if row["decode_bounded"] or size == "-" else " *"
        ratio = f"{_short(row['loss_ratio'])} {plus_minus} {_short(row['loss_ratio_se'])}"
        gap = _fixed(row["gap_closed"], 2)
        table.add_row(
            row["method"] + mark,
            str(size),
            ratio,
            *(_short(row[name]) for name in ("loss_increase", "loss_increase_low", "loss_increase_high", "kl")),
            *(_fixed(row[name], 3) for name in ("top1", "cosine", "mass_lost", "overlap")),
            gap,
            _fixed(row["entries_mean"], 1),
        )
    terminal.console().print(table)
    print()


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before zeros
