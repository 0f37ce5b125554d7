"""``kvbench train METHOD``: trains weights, or estimates tables, that methods need for one model.

Imports torch only when the work begins.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.counter import Counter
from kvbench.cli.draw import draw
from kvbench.cli.options import Text, Texts, plain
from kvbench.config.parsers import BadValue, number, parse, whole
from kvbench.console import signals, terminal
from kvbench.console.problems import Problems
from kvbench.errors import UserError, quote
from kvbench.eviction.options import parse_value
from kvbench.registry import did_you_mean
from kvbench.report import plots
from kvbench.sources.models import TINY, describe
from kvbench.store import check_out
from kvbench.train.catalogue import RECIPES, TABLES, Entry

if TYPE_CHECKING:
    from kvbench.train.loop import Trained
    from kvbench.train.recipe import Settings
    from kvbench.train.recipes.head_tables import HeadTable

EPILOG = """Examples:
  kvbench train lookaheadkv --model tiny --out runs/lookahead                  # the built-in model's own problems
  kvbench train lookaheadkv --model Qwen/Qwen3-4B --data questions.jsonl --out runs/q4 --opt rows=32 --opt rank=8
  kvbench train gkv-distill --model tiny --out runs/distilled                  # runs/distilled/model is a model
  kvbench train headkv --model tiny --out tables
  kvbench train duo --model tiny --out tables --steps 600 --batch 4 --json --plot figures
"""
CONTINUES = "interrupted: answers and the last checkpoint are saved; the same command continues from there."
NAMES = (*RECIPES, *TABLES)
SHOWN = 8
TABLE_SAMPLES = 32


def train(
    kind: Annotated[str, typer.Argument(metavar="METHOD", help=f"What to train: {', '.join(NAMES)}.")],
    out: Annotated[str, plain("--out", "Folder for the trained weights, or the table.", "DIR")],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Model: folder, hub name, or tiny (built in).")
    ] = TINY,
    data: Annotated[
        Text,
        plain("--data", "File of JSON lines with a field 'question'. Default: problems of built-in tasks.", "FILE"),
    ] = None,
    samples: Annotated[Text, plain("--samples", "Number of texts to read, or of questions to ask.", "N")] = None,
    steps: Annotated[Text, plain("--steps", "Number of optimiser steps.", "N")] = None,
    lr: Annotated[Text, plain("--lr", "Peak learning rate.", "X")] = None,
    batch: Annotated[Text, plain("--batch", "Number of answers per step.", "N")] = None,
    opt: Annotated[Texts, plain("--opt", "A setting of the recipe; repeatable.", "NAME=VALUE")] = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed of data and weights.")] = "0",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda.")] = "auto",
    plot: Annotated[Text, plain("--plot", "Folder for figures of the training log, SVG and PDF.", "DIR")] = None,
    json: Annotated[bool, plain("--json", "Last line of stdout is one JSON document.")] = False,
    quiet: Annotated[bool, plain("--quiet -q", "Print no progress and no table.")] = False,
) -> None:
    """Train what a method needs for a model, or estimate a table of heads from the model's attention.

    Writes DIR/METHOD.safetensors (DIR/model where the model itself is trained) and its card, a .json of the same name.
    After a kill the same command continues from the last checkpoint. A method finds its file beside the model, or by
    its option.
    """
    if kind not in NAMES:
        raise UserError(f"cannot train {quote(kind)}.{did_you_mean(kind, list(NAMES))} There are {', '.join(NAMES)}.")
    problems = Problems()
    numbers: dict[str, Any] = {}
    positive = number("a finite number > 0", lambda x: x > 0)
    parsers = {"samples": whole(1), "seed": whole(0, 2**64 - 1), "steps": whole(1), "lr": positive, "batch": whole(1)}
    for name, raw in (("samples", samples), ("seed", seed), ("steps", steps), ("lr", lr), ("batch", batch)):
        with problems.collect():
            numbers[name] = None if raw is None else parse(f"--{name}", parsers[name], raw)
    options: dict[str, Any] = {}
    with problems.collect():
        options = _options(kind, model, opt or [])
    only_trained = {"--data": data, "--steps": steps, "--lr": lr, "--plot": plot}
    with problems.collect():
        if kind in TABLES and (unused := [n for n, v in only_trained.items() if v]):
            raise UserError(f"{kind} is estimated, not trained; it takes no {unused[0]}.")
    with problems.collect():
        describe(model)
    with problems.collect():
        if plot is not None:
            plots.check()
    problems.stop()
    training = _Training(kind, model, check_out(out), data, numbers, options, device, plot, json, quiet)
    if kind in RECIPES:
        with signals.phase(lambda: CONTINUES):
            training.train()
    else:
        training.estimate()


def _options(kind: str, model: str, given: list[str]) -> dict[str, Any]:
    """Return the recipe's own settings: the values of --opt and, for settings that are not given, the recipe's
    defaults. given: the texts of --opt."""
    known: dict[str, Any] = {}
    if kind in RECIPES:
        known = dict(RECIPES[kind].options) | dict(RECIPES[kind].tiny if model == TINY else {})
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--opt takes NAME=VALUE; got {quote(text)}.")
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UserError(f"{kind} has no setting {quote(name)}.{did_you_mean(name, list(known))} It has {listed}.")
        try:
            known[name] = parse_value(value, type(known[name]))
            if isinstance(known[name], float) and not math.isfinite(known[name]):
                raise ValueError(value)
        except ValueError:
            need = {int: "a whole number", float: "a finite number"}.get(type(known[name]), "text")
            raise UserError(BadValue(need, quote(value)).sentence(f"--opt {name}")) from None
    return known


@dataclass(frozen=True, slots=True)
class _Training:
    """The checked options of the command, with methods that do its work.

    numbers: the values of samples, steps, lr, batch and seed by name; None stands for the recipe's default.
    """

    kind: str
    model: str
    folder: Path
    data: str | None
    numbers: dict[str, Any]
    options: dict[str, Any]
    device: str
    plot: str | None
    json: bool
    quiet: bool

    def train(self) -> None:
        """Train weights by a recipe, and print the result. Of several processes, only the first prints."""
        from kvbench.engine.model.weights import Base
        from kvbench.train.log_figure import log_figure
        from kvbench.train.loop import LOG, steps_done
        from kvbench.train.loop import train as run_loop
        from kvbench.train.prepare import prepare
        from kvbench.train.processes import is_first

        entry: Entry = RECIPES[self.kind]
        first = is_first()
        quiet = self.quiet or not first
        samples, name = self.numbers["samples"] or entry.traces, f"{self.kind} {self.model}"
        with Counter("answers", samples + entry.held_out, quiet=quiet) as counter:
            counter.cell(f"{name}: the model answers")
            ready = prepare(
                self.kind,
                self.model,
                data=self.data,
                samples=samples,
                steps=self.numbers["steps"] or entry.steps,
                lr=self.numbers["lr"] or (entry.tiny_lr if self.model == TINY else None) or entry.lr,
                batch=self.numbers["batch"] or entry.batch,
                seed=self.numbers["seed"],
                options=self.options,
                device=self.device,
                out=self.folder,
                on_answer=counter.at,
            )
        before = steps_done(self.folder)
        with Counter("steps", ready.recipe.settings.steps, quiet=quiet) as counter:
            counter.cell(f"{name}, continuing after step {before}" if before else name)

            def on_step(done: int, figures: dict[str, float]) -> None:
                counter.at(done, "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))

            done = run_loop(
                ready.recipe,
                self.folder,
                base=Base(name=self.model, config=ready.loaded.model.config, fingerprint=ready.loaded.fingerprint),
                revision=ready.revision,
                command=_command(self.kind, self.model, self.data, ready.recipe.settings),
                on_step=on_step,
            )
        if not first:
            return
        if not done.improved(ready.recipe):
            figure = ready.recipe.figure
            terminal.warning(f"the held-out {figure} did not improve; train longer or with other settings.")
        if not quiet:
            _print_trained(done)
        if self.plot is not None:
            draw([log_figure(self.folder / LOG, self.kind)], self.plot)
        if self.json:
            terminal.data(done.card | {"path": str(done.path)})

    def estimate(self) -> None:
        """Estimate the importance of every head from the model's attention, and print the most important ones."""
        from kvbench.train.recipes.head_tables import make

        samples, seed = self.numbers["samples"] or TABLE_SAMPLES, self.numbers["seed"]
        with Counter("samples", samples, quiet=self.quiet) as counter:
            counter.cell(f"{self.kind} {self.model}")
            table = make(self.model, self.folder, samples=samples, seed=seed, device=self.device, on_example=counter.at)
        if not self.quiet:
            _print_table(table)
        if self.json:
            terminal.data(table.card | {"path": str(table.path)})


def _command(kind: str, model: str, data: str | None, settings: Settings) -> str:
    """Return the command line that repeats this training, for the card of the weights. It has the name of the data
    file but no other path of this machine."""
    numbers = f"--steps {settings.steps} --lr {settings.lr:g} --batch {settings.batch} --seed {settings.seed}"
    own = "".join(" --opt " + shlex.quote(f"{name}={settings.more[name]}") for name in RECIPES[kind].options)
    file = f" --data {shlex.quote(Path(data).name)}" if data else ""
    head = f"kvbench train {kind} --model {shlex.quote(model)}{file}"
    return f"{head} --samples {settings.more['samples']} {numbers}{own} --out DIR"


def _print_trained(done: Trained) -> None:
    """Print the recipe's held-out figures before and after training, and the paths of the written files."""
    rows = [(name, f"{done.before[name]:.4g}", f"{done.after[name]:.4g}") for name in done.after]
    terminal.table(("held out", "before", "after"), rows, right=("before", "after"))
    _print_files(done.path)


def _print_table(heads: HeadTable) -> None:
    """Print the heads with the highest importance, and the paths of the written files."""
    columns = ("layer", "query head", "importance")
    width, importance = heads.table.shape[1], heads.table.flatten()
    first = importance.argsort(descending=True)[:SHOWN].tolist()
    rows = [(str(index // width), str(index % width), f"{importance[index]:.3f}") for index in first]
    terminal.table(columns, rows, right=columns)
    if len(importance) > SHOWN:
        print(f"and {len(importance) - SHOWN} more heads")
    _print_files(heads.path)


def _print_files(path: Path) -> None:
    print(f"wrote {terminal.clean(str(path))} and {terminal.clean(path.with_suffix('.json').name)}")
