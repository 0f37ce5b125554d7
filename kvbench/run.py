"""The run loop: plan the rows, skip those already saved, drive the engine cell by cell, score, keep.

    result = execute(config, out=Path("results"))

Everything that can fail cheaply fails before the weights are loaded: data, prompts, the folder, the plan. A row
counts once its record is on disk. The command line does the checks that need neither torch nor a tokenizer before it
gets here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import huggingface_hub
import transformers

from kvbench import env, models, plugins
from kvbench.cell_plan import CellPlan, plan_rows
from kvbench.config import OPERATIONAL, RunConfig
from kvbench.data import Data
from kvbench.engine.loop import Engine
from kvbench.engine.model import LoadedModel, load, pick_device, pick_dtype
from kvbench.engine.plan import measure, read_shape, use_threads
from kvbench.errors import Interrupted, UserError, show
from kvbench.records import Generation
from kvbench.rows import make_row
from kvbench.scoring.pool import ScorePool
from kvbench.store import Journal, RunFolder, resume_command
from kvbench.task import Output, Score
from kvbench.work import PlannedRow, TaskWork, make_method

if TYPE_CHECKING:
    from kvbench.progress import Progress

Notice = Callable[[str], None]
AFTER_SIGNAL = 3.0  # seconds that rows being scored get to finish after a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `failed` counts rows with a status other than "ok", by status."""

    run_dir: Path | None  # None after a dry run
    done: int
    planned: int
    plans: tuple[CellPlan, ...]
    failed: Mapping[str, int] = field(default_factory=dict)


def execute(
    config: RunConfig,
    *,
    out: Path,
    run_name: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    allow_version_change: bool = False,
    take_over: bool = False,
    sources: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    notice: Notice | None = None,
) -> RunResult:
    """Run a configuration to the end, continuing what is already there.

    Args:
        out: folder of runs; the run's own folder is `run_name`, by default model and configuration hash.
        resume: the run must exist.
        notice: receives one-line warnings; default prints them to stderr.

    Raises:
        KVBenchError: see the subclasses; Interrupted after Ctrl-C or SIGTERM, with all finished rows saved.
    """
    say = notice or (lambda text: print(f"warning: {text}", file=sys.stderr))
    info = models.describe(config.model, config.revision)
    where = str(info.folder or info.name)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    tokenizer, model_config = _read_model(where, config)
    info = models.describe(config.model, config.revision)  # of a hub model the commit is known now
    context = info.context or int(getattr(model_config.get_text_config(), "max_position_embeddings", 1 << 20))
    data = Data(config.data)
    works = {n: TaskWork.load(n, config, data, tokenizer, model_config.model_type, context) for n in config.tasks}
    for work in works.values():
        for note in work.notes:
            say(note)
    shape = read_shape(model_config)
    threads = use_threads(shape, device)
    machine = measure(device, dtype)
    identity = {"model": config.model, "model_revision": models.revision(info) or config.revision}
    plans = tuple(
        plan_rows(cell, works[cell.task], config, shape, machine, identity, info, model_config, context, device, dtype)
        for cell in config.cells()
    )
    total = sum(len(p.rows) for p in plans)
    if dry_run:
        return RunResult(run_dir=None, done=0, planned=total, plans=plans)

    name = run_name or f"{Path(config.model).name}-{config.hash()[:8]}"
    environment = {
        "kvbench_version": env.version("kvbench"),
        "torch_version": env.version("torch"),
        "transformers_version": env.version("transformers"),
        "versions": env.versions(),
        "git": env.git_commit(),
        "machine": env.machine(),
        "device": str(device),
        "threads": threads,
        **{name: getattr(config, name) for name in OPERATIONAL},
        "data_variable": os.environ.get("KVBENCH_DATA"),
        "plugins": plugins.loaded(config.plugin),
        "sources": dict(sources or {}),
        "model": identity,
        "tasks": {n: {"version": w.task.version, "data": dict(w.data)} for n, w in works.items()},
        "kv_cache": {  # what an entry takes, for `kvbench report --memory`
            "element_bytes": dtype.itemsize,
            "layers": [
                {"kv_heads": g.kv_heads, "head_dim": g.head_dim, "value_dim": g.value_dim, "window": g.window}
                for g in shape.geometry
            ],
        },
        "plans": [{"cell": p.cell.label, "plan": p.plan.line()} for p in plans],
    }
    opener = RunFolder.resume if resume else RunFolder.start
    extra: dict[str, Any] = {} if resume else {"config": config.stored(), "command": command, "planned": total}
    with opener(
        out, name, environment=environment, take_over=take_over, allow_version_change=allow_version_change, **extra
    ) as folder:
        _check_data(name, folder.info["environment"]["tasks"], environment["tasks"])
        _check_plugins(name, folder.info["environment"].get("plugins", []), environment["plugins"])
        done = folder.done_keys()
        for text in folder.notices:
            say(text)
        keys = {row.key for p in plans for row in p.rows}
        runner = _Runner(folder, works, plans, progress, len(keys & done), total, dtype, str(device), config)
        if not keys <= done:
            with _signals(runner):
                runner.run(load(where, revision=config.revision, device=str(device), dtype=config.dtype), done)
        folder.seal()
        return RunResult(run_dir=folder.path, done=runner.done, planned=total, plans=plans, failed=runner.failed)


def _check_data(run: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A continued run must find the documents it began with: rows of two versions would be averaged as one."""
    for task, found in now.items():
        known = before.get(task, found)
        for what in ("sha256", "revision"):
            if known["data"].get(what) != found["data"].get(what):
                raise UserError(
                    f"the data of task {show(task)} changed since run {show(run)} began "
                    f"({what} {known['data'].get(what)}, now {found['data'].get(what)}). Give another --run-name."
                )
        if known["version"] != found["version"]:
            raise UserError(
                f"task {show(task)} is at version {found['version']}; run {show(run)} began with {known['version']}. "
                "Give another --run-name."
            )


def _check_plugins(run: str, before: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> None:
    """A continued run must have the plug-ins it began with, wherever their files lie now."""
    if sorted(p["sha256"] for p in before) != sorted(p["sha256"] for p in now):
        was, has = (
            ", ".join(f"{Path(p['path']).name} {p['sha256'][:12]}" for p in ps) or "none" for ps in (before, now)
        )
        raise UserError(
            f"the plug-ins of run {show(run)} changed since it began ({was}; now {has}). Give another --run-name."
        )


def _read_model(where: str, config: RunConfig) -> tuple[Any, Any]:
    """Tokenizer and configuration, from a folder or the hub."""
    transformers.logging.set_verbosity_error()
    if Path(where).is_dir():
        models.check_tokenizer(config.model, Path(where))
    huggingface_hub.logging.set_verbosity_error()  # it tells of every retry; the outcome is told below
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, revision=config.revision, trust_remote_code=False)
        return tokenizer, transformers.AutoConfig.from_pretrained(
            where, revision=config.revision, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise models.unreadable(config.model, where, error) from error


class _Runner:
    """State of one execution: what is done, what is being scored, whether to stop."""

    def __init__(
        self,
        folder: RunFolder,
        works: Mapping[str, TaskWork],
        plans: Sequence[CellPlan],
        progress: Progress | None,
        done: int,
        total: int,
        dtype: Any,
        device: str,
        config: RunConfig,
    ) -> None:
        self.folder, self.works, self.plans, self.progress, self.config = folder, works, plans, progress, config
        self.done, self.total = done, total
        self.host = {"device": device, "dtype": str(dtype).removeprefix("torch."), "attention": "sdpa"}
        self.failed: dict[str, int] = {}
        self.stop: int | None = None  # the signal that asked for it
        self.tokens = self.kv_now = self.kv_peak = 0
        self.scores: list[float] = []
        self._shown = 0.0

    def run(self, loaded: LoadedModel, done: set[str]) -> None:
        if self.progress:
            self.progress.begin(self.total, self.done)
        try:
            with self.folder.journal() as journal, ScorePool() as pool:
                for cell_plan in self.plans:
                    missing = [row for row in cell_plan.rows if row.key not in done]
                    if missing:
                        self._cell(loaded, cell_plan, missing, journal, pool)
                    if self.stop is not None:
                        self._interrupt(journal)
        finally:
            if self.progress:
                self.progress.end()

    def _cell(
        self, loaded: LoadedModel, cell_plan: CellPlan, missing: list[PlannedRow], journal: Journal, pool: ScorePool
    ) -> None:
        cell, work = cell_plan.cell, self.works[cell_plan.cell.task]
        if self.progress:
            self.progress.cell(cell.label)
        self.scores, self.kv_peak = [], 0
        planned = {(row.prompt.doc.doc_id, row.sample): row for row in missing}
        scoring: list[tuple[Future[Score] | None, PlannedRow, Generation]] = []

        def step(tokens: int, kv_bytes: int, slots: int) -> None:
            self.tokens, self.kv_now, self.kv_peak = self.tokens + tokens, kv_bytes, max(self.kv_peak, kv_bytes)
            self.done += len(journal.poll())
            self._show()
            if self.stop is not None:
                raise _Stop

        engine = Engine(
            loaded,
            make_method(cell),
            budget=cell.budget,
            interval=self.config.interval,
            slots=cell_plan.plan.slots,
            max_tokens=cell_plan.max_tokens,
            max_output=cell_plan.max_output,
            tail=cell_plan.tail,
            prefill_chunk=self.config.prefill_chunk,
            prefill=self.config.prefill,
            on_step=step,
        )
        with contextlib.suppress(_Stop):
            for generation in engine.generate(work.requests(missing, self.config.seed)):
                row = planned[generation.request.doc_id, generation.sample]
                output = Output(
                    text=generation.text,
                    stop_reason=generation.stop_reason,
                    prompt_tokens=len(generation.request.prompt_ids),
                    output_tokens=len(generation.token_ids),
                    thinking=work.thinking,
                )
                ok = generation.status == "ok"
                scoring.append((pool.submit(work.task, row.prompt.doc, output) if ok else None, row, generation))
                scoring = [item for item in scoring if not self._kept(*item, cell_plan, journal)]
        patience = AFTER_SIGNAL
        while scoring and patience > 0:  # after a signal the slow ones are left: their rows are missing and run again
            scoring = [item for item in scoring if not self._kept(*item, cell_plan, journal)]
            time.sleep(0.01 if scoring else 0)
            patience -= 0.01 if self.stop is not None else 0
        self.done += len(journal.flush())
        self._show(now=True)

    def _kept(
        self,
        future: Future[Score] | None,
        planned: PlannedRow,
        generation: Generation,
        cell_plan: CellPlan,
        journal: Journal,
    ) -> bool:
        """Write one row if it has been scored. A failed row keeps its text and has no score."""
        if future is not None and not future.done():
            return False
        score = future.result() if future is not None else None
        row = make_row(planned, generation, score, self.works[cell_plan.cell.task].task, cell_plan, self.host)
        if row["status"] != "ok":
            self.failed[row["status"]] = self.failed.get(row["status"], 0) + 1
        elif score is not None and (headline := row[self.works[cell_plan.cell.task].task.headline]) is not None:
            self.scores.append(headline)
        self.done += len(journal.append(row, prompt=planned.prompt.text, output=generation.text))
        return True

    def _show(self, *, now: bool = False) -> None:
        if self.progress is None or (not now and time.monotonic() - self._shown < 0.25):
            return
        self._shown = time.monotonic()
        mean = half = None
        if n := len(self.scores):
            mean = sum(self.scores) / n
            if n > 1:
                half = 1.96 * (sum((s - mean) ** 2 for s in self.scores) / (n - 1) / n) ** 0.5
        self.progress.update(self.done, self.tokens, self.kv_now, self.kv_peak, mean, half)

    def _interrupt(self, journal: Journal) -> None:
        journal.flush()
        raise Interrupted(
            f"interrupted: {self.done} of {self.total} rows saved; continue with {resume_command(self.folder.path)}",
            128 + (self.stop or signal.SIGINT),
        )


class _Stop(Exception):
    """Leaves the generation loop between two steps."""


@contextlib.contextmanager
def _signals(runner: _Runner) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run between two steps with all finished rows saved; the second ends it at
    once.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        runner.stop = number
        for each in previous:
            signal.signal(each, signal.SIG_DFL)

    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs us handles signals
        previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        for each in previous:
            signal.signal(each, ask)
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
