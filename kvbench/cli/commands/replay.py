"""``kvbench replay``: methods read finished answers again, and what they predict is compared with the full cache, or
what they hold and what is attended to is looked at in other ways (``--analysis``).

Checks come first; `kvbench.replay` does the work and imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench import registry
from kvbench.cli.checks import check
from kvbench.cli.commands.show import one_run
from kvbench.cli.options import Plugins, plain, takes
from kvbench.cli.replayed_run import check_same, named, of_run
from kvbench.cli.request import build
from kvbench.config.layers import gather
from kvbench.config.parsers import parse, split
from kvbench.config.plugins import load_plugins
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.config.settings import PARSERS
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import Progress
from kvbench.errors import UserError, show
from kvbench.eviction import choose
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import Analysis, AttentionAnalysis, Row, analyses
from kvbench.replay.analyses.api import choose as choose_analyses
from kvbench.sources import hub
from kvbench.sources.models import describe
from kvbench.sources.models import revision as revision_of

if TYPE_CHECKING:
    from kvbench.replay.batches import Result
    from kvbench.replay.choices import LeftOut
    from kvbench.runner.workload import TaskWork

EPILOG = f"""Examples:
  kvbench replay --method all --budget 32,64 --task chain,walk
  kvbench replay --method gkv,rkv --budget 48 --interval 32 --task walk --limit 16 --json
  kvbench replay --method golden --method-opt golden.within=mean --budget 32 --task chain
  kvbench replay --method h2o,snapkv --budget 25% --run results/first --out replayed
  kvbench replay --analysis overlap,sparsity --task walk --out looked
  kvbench replay --analysis tokens --method gkv,rkv --budget 64 --task walk --limit 1 --out looked

Analyses:
{chr(10).join(f"  {name}: {kind.about}" for name, kind in analyses().items())}
"""
ALL = "all"
LIMIT = "64"  # answers of each task

Methods = Annotated[
    list[str] | None,
    plain("--method -m", "Methods, repeatable or with commas; all: every one that can run.", "NAME"),
]
Run = Annotated[
    str | None,
    plain(
        "--run",
        "Answers that the full cache wrote in this run, instead of new ones; model and tasks are the run's.",
        "RUN",
    ),
]
Limit = Annotated[str | None, plain("--limit", f"Answers of each task. Default: {LIMIT}.", "N")]
Folder = Annotated[str | None, plain("--out", "Write tables (CSV, Parquet), plots and JSON there.", "DIR")]
Analyses = Annotated[
    list[str] | None,
    plain("--analysis", "Instead of the comparison: analyses (below), repeatable or with commas.", "NAME"),
]
Sample = Annotated[str | None, plain("--sample", "With --analysis: only the answer to this question.", "ID")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What there is to do beside the configuration. most: answers of a run's task that are taken."""

    named: list[MethodChoice]
    every: list[MethodChoice]
    run: str | None
    most: int | None
    kinds: list[type[Analysis]]
    sample: str | None


@takes(
    *("budget", "task", "method_opt", "task_file", "chat_template", "model", "revision", "seed", "max_new_tokens"),
    *("stop", "interval", "data", "device", "dtype", "json", "quiet"),
)
def replay(
    context: typer.Context,
    typed: Mapping[str, Any],
    method: Methods = None,
    run: Run = None,
    plugin: Plugins = None,
    limit: Limit = None,
    analysis: Analyses = None,
    sample: Sample = None,
    out: Folder = None,
) -> None:
    """Compare methods token by token on answers that are given: the loss that eviction adds, without any sampling.

    The model answers each question once with the full cache. Every method then reads the same answers with its own
    cache, evicting when a run would, and its predictions are compared with the full cache's. The oracle 'golden' and
    'random' are always among them: how much of the way from one to the other does a method come?
    With --analysis, what the papers look at instead: where attention goes, and what methods keep of it.
    """
    if given := gather({"plugin": plugin}, os.environ).typed("plugin"):
        load_plugins(parse(given.source, PARSERS["plugin"], given.value))
    problems, quiet = Problems(), bool(typed["quiet"])
    flags = dict(context.params) | {"limit": limit or LIMIT}
    kinds = _kinds(analysis, flags, problems)
    if out is not None and any(kind.plotted for kind in kinds):
        with problems.collect():
            plots.check()
    problems.stop()
    alone = bool(kinds) and all(issubclass(kind, AttentionAnalysis) for kind in kinds)
    names = ["full"] if alone else _names(method, problems)
    problems.stop()
    listed = [name for name in names if name != ALL]
    config = _config(flags, [*listed, *(registry.methods.names() if ALL in names else [])], run, problems)
    if config is not None and ALL in names and not config.budgets:
        problems.errors.append(UserError("--budget is missing. Example: --budget 512."))
    problems.stop()
    assert config is not None
    most = parse("--limit", PARSERS["limit"], limit) if limit is not None else None
    asked = _Asked(
        named=[m for m in config.methods if m.name in listed],
        every=[m for m in config.methods if m.name not in listed],
        run=run,
        most=most,
        kinds=kinds,
        sample=sample,
    )
    _check(config, problems)
    if typed["model"] is None and run is None and not quiet:
        terminal.note(f"no --model given: using the built-in model {show(config.model)}.")

    from kvbench.replay.output import LEGEND, show_analysis, show_result, write, write_analyses

    with hub.only(None if run is None else named(config, typed["task"])):
        results, found, left_out = _work(config, asked, _Readings(quiet=quiet))
    document = _document(config, asked, left_out)
    if kinds:
        document = {"analyses": {kind.name: rows for kind, rows in found.items()}} | document
    else:
        document = {"rows": [row for result in results for row in result.rows]} | document
    if out is not None:
        folder = write_analyses(out, found, document) if kinds else write(out, results, document)
        terminal.note(f"tables are in {folder}.")
    if not quiet:
        for result in results:
            show_result(result)
        if results:
            print(LEGEND)
        for kind, rows in found.items():
            show_analysis(kind, rows)
        for left in left_out:
            at = "" if left.budget is None else f" at {left.budget}"
            terminal.note(f"left out: {left.method}{at}: {left.reason}")
    if typed["json"]:
        terminal.data(document)


def _kinds(given: list[str] | None, flags: Mapping[str, Any], problems: Problems) -> list[type[Analysis]]:
    """The analyses that were asked for. Options that they would not look at are refused."""
    with problems.collect():
        if not given:
            if flags["sample"] is not None:
                raise UserError("--sample is given without --analysis. Example: --analysis tokens.")
            return []
        kinds = choose_analyses([str(name) for name in split("--analysis", given, "Example: --analysis overlap.")])
        if all(issubclass(kind, AttentionAnalysis) for kind in kinds):
            for key in ("method", "budget", "method_opt", "interval"):
                if flags[key]:
                    names = ",".join(kind.name for kind in kinds)
                    option = f"--{key.replace('_', '-')}"
                    raise UserError(
                        f"{option} cannot be given with --analysis {names}: only the full cache is looked at."
                    )
        return kinds
    return []


def _names(given: list[str] | None, problems: Problems) -> list[str]:
    with problems.collect():
        if not given:
            raise UserError("--method is missing. Give a method name, or all; 'kvbench list methods' shows them.")
        names = dict.fromkeys(str(name).strip() for name in split("--method", given, "Example: --method all."))
        return [ALL if name.lower() == ALL else choose.canonical(name) for name in names]
    return []


def _config(flags: Mapping[str, Any], methods: list[str], run: str | None, problems: Problems) -> RunConfig | None:
    """What was asked for as a run's configuration; of a run, its own with the methods and budgets that were given."""
    typed = {**flags, "method": methods, "plugin": None}  # plug-ins are loaded
    if run is None:
        return build(gather(typed, os.environ), problems)
    with problems.collect():
        return of_run(typed | {"plugin": flags["plugin"]}, run, problems)
    return None


def _check(config: RunConfig, problems: Problems) -> None:
    """What a run would refuse too, apart from methods: `kvbench.replay.choices` checks these."""
    with problems.collect():
        info = describe(config.model_place, config.revision)
        grids = tuple(Grid(methods=(), tasks=g.tasks, budgets=g.budgets, limit=g.limit) for g in config.grids)
        check(_unscored(dataclasses.replace(config, grids=grids)), info, problems)
    problems.stop()


def _unscored(config: RunConfig) -> RunConfig:
    """Nothing is scored here, so neither a judge nor a sandbox is needed."""
    return dataclasses.replace(config, judge="none", unsafe_run_code=True)


def _work(
    config: RunConfig, asked: _Asked, progress: _Readings
) -> tuple[list[Result], dict[type[Analysis], list[Row]], list[LeftOut]]:
    """What the comparison found, or the analyses, and who was left out."""
    from kvbench.engine.model.load import load, pick_device
    from kvbench.engine.model.shape import known_shape, use_threads
    from kvbench.replay.analyses.api import Study
    from kvbench.replay.batches import replay as compare
    from kvbench.replay.choices import Target, plan
    from kvbench.replay.correctness import check_scorable, scored, stored_scores
    from kvbench.replay.read_analyses import read
    from kvbench.replay.traces import own, stored
    from kvbench.runner.inputs import read_inputs

    ready = read_inputs(_unscored(config), terminal.warning)
    works = _only(ready.works, asked.sample)
    scoring = any(kind.scored for kind in asked.kinds)
    folder = one_run(asked.run, Path("results")) if asked.run is not None else None
    if folder is not None:
        check_same(config, folder, ready)
    for work in works.values() if scoring and folder is None else ():
        check_scorable(work)
    load_model = partial(load, ready.where, revision=config.revision, device=config.device, dtype=config.dtype)
    shape, early = known_shape(ready.config, load_model)
    longest = {name: max(p.max_tokens for p in work.prompts) for name, work in works.items()}
    target = Target(shape.geometry, ready.config, ready.info.folder, max(longest.values()))
    plan(asked.named, asked.every, config.budgets, target)  # what is wrong is told before the model is loaded
    use_threads(shape, pick_device(config.device))
    loaded = early or load_model()
    target = dataclasses.replace(target, fingerprint=loaded.fingerprint)
    chosen, left_out = plan(asked.named, asked.every, config.budgets, target)
    results: list[Result] = []
    found: dict[type[Analysis], list[Row]] = {kind: [] for kind in asked.kinds}
    attention = any(issubclass(kind, AttentionAnalysis) for kind in asked.kinds)
    watched = not asked.kinds or not all(issubclass(kind, AttentionAnalysis) for kind in asked.kinds)
    try:
        for name, work in works.items():
            if folder is None:
                wanted = [p for p in work.prompts if asked.sample in (None, p.doc.doc_id)]
                work = dataclasses.replace(work, prompts=wanted)
                progress.task(f"{name}, answering", len(wanted), "answers")
                traces = own(work, loaded, config.seed, terminal.warning, progress.next)
            else:
                traces = stored(folder, work, loaded.tokenizer, ready.context, config.seed, terminal.warning)
                traces = [t for t in traces if asked.sample in (None, t.request.doc_id)][: asked.most]
            progress.end()
            if asked.kinds and not traces:
                raise UserError(f"task {show(name)} has no answer to look at.")
            progress.task(name, len(traces) * (len(chosen) * watched + attention), "readings")
            if asked.kinds:
                right = {} if not scoring else stored_scores(folder, name) if folder else scored(work, traces, loaded)
                decode = loaded.tokenizer.decode
                study = Study(task=name, traces=traces, interval=config.interval, text=decode, right=right)
                looking = [kind(study) for kind in asked.kinds]
                read(loaded, study, looking, chosen, max_tokens=longest[name], tick=progress.next)
                for kind, analysis in zip(asked.kinds, looking):
                    found[kind] += (rows := analysis.rows())
                    if not rows:
                        terminal.warning(f"analysis {kind.name} finds nothing in {show(name)}: answers are too short.")
            else:
                settings = {"interval": config.interval, "max_tokens": longest[name]}
                results.append(compare(loaded, name, traces, chosen, **settings, tick=progress.next))
            progress.end()
    finally:
        progress.end()
    return results, found, left_out


def _only(works: dict[str, TaskWork], sample: str | None) -> dict[str, TaskWork]:
    """The tasks that have a question of this name. Raises UserError when none has."""
    if sample is None:
        return works
    found = {name: work for name, work in works.items() if any(p.doc.doc_id == sample for p in work.prompts)}
    if not found:
        raise UserError(f"--sample {show(sample)}: none of the tasks' first questions has this name (--limit).")
    return found


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


def _document(config: RunConfig, asked: _Asked, left_out: list[LeftOut]) -> dict[str, Any]:
    from kvbench.runner import env

    return {
        "left_out": [dataclasses.asdict(left) for left in left_out],
        "model": config.model,
        "model_revision": revision_of(describe(config.model_place, config.revision)),
        "run": asked.run,
        "settings": {
            "interval": config.interval,
            "limit": config.limit if asked.run is None else asked.most,
            "seed": config.seed,
            "device": config.device,
            "dtype": config.dtype,
            "max_new_tokens": config.max_new_tokens,
        },
        "versions": env.versions(),
        "git": env.git_commit(),
        "command": sys.argv[1:],
    }
