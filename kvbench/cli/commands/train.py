"""``kvbench train METHOD``: trains weights, or estimates tables, that methods need for one model.

Imports torch only when the work begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.counter import Counter
from kvbench.cli.draw import draw
from kvbench.cli.options import LastLine, Plugins, Text, Texts, declare, option, takes
from kvbench.cli.train_plan import print_plan, refuse_without_plan
from kvbench.cli.train_settings import command_line, settings_of
from kvbench.config.parsers import number, parse, whole
from kvbench.config.plugins import load_plugins
from kvbench.console import signals, terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import preparing
from kvbench.errors import UserError, bare, quote
from kvbench.registry import did_you_mean, recipes
from kvbench.report import plots
from kvbench.sources.models import TINY, describe
from kvbench.store import check_out
from kvbench.train.catalogue import BUILT_IN, TABLES, entry_of
from kvbench.train.data_place import check_data
from kvbench.train.entry import COUNTS, FLAGS, PROMPTING, Entry
from kvbench.train.prompting import Prompting

if TYPE_CHECKING:
    from kvbench.train.loop import Trained
    from kvbench.train.tables import Table

EPILOG = """Examples:
  kvbench train gkv-rl --model Qwen/Qwen3-4B --preset paper --dry-run --gpu-memory 80GB --processes 8    # memory
  kvbench train lookaheadkv --model tiny --out runs/lookahead                  # the built-in model's own problems
  kvbench train lookaheadkv --model Qwen/Qwen3-4B --data questions.jsonl --out runs/q4 --opt rows=32 --opt rank=8
  kvbench train gkv-distill --model tiny --out runs/distilled                  # runs/distilled/model is a model
  kvbench train foresightkv --preset paper --model Qwen/Qwen3-4B --data questions.jsonl --out runs/scorer
  kvbench train duo --model MODEL --evaluate 100 --plot figures --out runs/duo  # held-out figures while it trains
  kvbench train trimkv --model MODEL --continue-from runs/trimkv --steps 500 --out runs/longer
  kvbench train my-recipe --plugin my_recipe.py --out runs/mine                # docs/plugins.md
  kvbench train headkv --model tiny --out tables
  kvbench train duo --model tiny --out tables --steps 600 --batch 4 --json --plot figures
  kvbench train gkv-rl --model MODEL --data hub:agentica-org/DeepScaleR-Preview-Dataset --out runs/rl
  kvbench train trimkv --model MODEL --data traces.parquet --opt max_tokens=16384 --out runs/trimkv    # given answers
"""
CONTINUES = "interrupted: answers and the last checkpoint are saved; the same command continues from there."
WHAT = f"What to train: {', '.join((*BUILT_IN, *TABLES))}, or a plug-in's recipe."
SETTINGS = "A setting of the recipe; repeatable. 'kvbench list recipes METHOD' shows all."
SHOWN = 8
TABLE_SAMPLES = 32
PARSERS = {
    "samples": whole(1),
    "seed": whole(0, 2**64 - 1),
    "steps": whole(1),
    "lr": number("a finite number > 0", lambda x: x > 0),
    "batch": whole(1),
    "evaluate": whole(1),
}
# Options that do not apply to tables.
OF_RECIPES = (
    *("data", "steps", "lr", "batch", "preset", "plot", "continue_from", "evaluate", "dry_run"),
    *("thinking", "prompt_style", "system"),
)
OWN = (
    option("out", Text, "Folder for the trained weights, or the table.", metavar="DIR"),
    declare(
        "model",
        Annotated[str, typer.Option("--model", metavar="MODEL", help="Model: folder, hub name, or tiny (built in).")],
        TINY,
    ),
    option(
        "data",
        Text,
        "Questions, conversations or texts: JSON lines, CSV, parquet, a folder, or a data set on the hub, as "
        "hub:OWNER/NAME[:SPLIT][@REVISION]. Default: built-in problems.",
        metavar="FILE",
    ),
    option("prompt_style", Text, "Style of questions, as in kvbench run. Default: plain.", metavar="NAME"),
    option("system", Text, "System message of questions that have none.", metavar="TEXT"),
    option("samples", Text, "Number of texts to read, or of questions to ask.", metavar="N"),
    option("steps", Text, "Number of optimiser steps.", metavar="N"),
    option("lr", Text, "Peak learning rate.", metavar="X"),
    option("batch", Text, "Number of answers per step.", metavar="N"),
    option("preset", Text, "Preset whose settings replace the defaults: paper.", metavar="NAME"),
    option("opt", Texts, SETTINGS, metavar="NAME=VALUE"),
    option("continue_from", Text, "Folder of a finished training: begin with its weights.", metavar="DIR"),
    option(
        "evaluate",
        Text,
        "Compute the figures on held-out data every N steps, not only before and after training.",
        metavar="N",
    ),
    declare("plugin", Plugins),
    declare("seed", Annotated[str, typer.Option("--seed", metavar="N", help="Seed of data and weights.")], "0"),
    declare("device", Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda.")], "auto"),
    option("dry_run", bool, "Print the training's plan, tokens and memory; load no weights.", default=False),
    option("gpu_memory", Text, "With --dry-run: plan for a GPU with this memory, like 80GB.", metavar="SIZE"),
    option("processes", Text, "With --dry-run: plan for N processes, each with its own GPU.", metavar="N"),
    option("plot", Text, "Folder for figures of the training log, SVG and PDF.", metavar="DIR"),
    declare("json", LastLine, False),
    option("quiet", bool, "Print no progress and no table.", short="-q", default=False),
)


@takes(*OWN, "thinking")
def train(typed: Mapping[str, Any], kind: Annotated[str, typer.Argument(metavar="METHOD", help=WHAT)]) -> None:
    """Train what a method needs for a model, or estimate a number for every head from the model's attention.

    Writes DIR/METHOD.safetensors; if the model itself is trained, DIR/model or DIR/adapter.
    A card with the same name and the suffix .json describes the written weights.
    If a training is interrupted, the same command continues from the last checkpoint.
    A method reads the written file if it lies beside the model's weights, or if the method's option names it.
    """
    load_plugins(typed["plugin"] or [])
    names = [*recipes.names(), *TABLES]
    if kind not in names:
        raise UserError(f"cannot train {quote(kind)}.{did_you_mean(kind, names)} There are {', '.join(names)}.")
    model, data, preset, dry_run = typed["model"], typed["data"], typed["preset"], typed["dry_run"]
    problems = Problems()
    numbers: dict[str, Any] = {}
    for name, parser in PARSERS.items():
        with problems.collect():
            numbers[name] = None if typed[name] is None else parse(f"--{name}", parser, typed[name])
    evaluate = numbers.pop("evaluate", None) or 0
    settings: dict[str, Any] = {}
    with problems.collect():
        settings = settings_of(kind, model, preset, typed["opt"] or [])
    words = {name: typed[name] for name in PROMPTING}
    given = {name: value for name, value in (numbers | words).items() if value is not None}
    prompting = Prompting()
    with problems.collect():
        chosen = {name: (settings | given).get(name, default) for name, default in PROMPTING.items()}
        prompting = Prompting(**chosen, preset=preset if "thinking" not in given else None)
    with problems.collect():
        unused = [name for name in OF_RECIPES if typed[name] or name in given]
        if kind in TABLES and unused:
            raise UserError(f"{kind} is estimated, not trained; it takes no --{unused[0].replace('_', '-')}.")
    with problems.collect():
        if preset and data is None and prompting.settings() and not dry_run:
            listed = ", ".join(f"{name}={bare(value)}" for name, value in prompting.settings().items())
            raise UserError(f"--preset {bare(preset)} with {listed} needs questions from a file; give --data FILE.")
    with problems.collect():
        describe(model, weights=not dry_run)
    with problems.collect():
        if data is not None:
            check_data(data)
    with problems.collect():
        if typed["plot"] is not None:
            plots.check()
    with problems.collect():
        if not dry_run:
            refuse_without_plan(typed["gpu_memory"], typed["processes"])
    with problems.collect():
        if typed["out"] is None and not dry_run:
            raise UserError("--out is missing: give the folder for the result.")
    problems.stop()
    settings |= given
    if dry_run:
        print_plan(kind, settings | {"seed": 0} | given, typed)
        return
    training = _Training(kind, check_out(typed["out"]), prompting, settings, evaluate, typed)
    if kind not in TABLES:
        from kvbench.train.processes import joined

        with signals.phase(lambda: CONTINUES), joined():
            training.train()
    else:
        training.estimate()


@dataclass(frozen=True, slots=True)
class _Training:
    """The checked options of the command. The methods of this class do the command's work.

    settings: the value of every setting by name (samples, steps, lr, batch, seed, and those of optimiser and recipe),
    and the preset's name. typed: the values of the options, by name.
    """

    kind: str
    folder: Path
    prompting: Prompting
    settings: dict[str, Any]
    evaluate: int
    typed: Mapping[str, Any]

    def train(self) -> None:
        """Train weights by a recipe, and print the result. Of several processes, only the first prints."""
        with preparing("loading torch and transformers", quiet=self.typed["quiet"]):
            from kvbench.engine.model.weights import Base
            from kvbench.train.log_figure import log_figure
            from kvbench.train.loop import HELD_OUT, LOG, steps_done
            from kvbench.train.loop import train as run_loop
            from kvbench.train.out_of_memory import OF_DATA, explained
            from kvbench.train.prepare import prepare
            from kvbench.train.processes import is_first

        typed, entry = self.typed, entry_of(self.kind)
        first = is_first()
        model, quiet = typed["model"], typed["quiet"] or not first
        samples, seed, name = self.settings["samples"], self.settings["seed"], f"{self.kind} {model}"
        options = {name: value for name, value in self.settings.items() if name not in (*FLAGS, "seed")}
        if not quiet:
            self._say_preset(entry)
        with Counter("answers", samples + entry.held_out, quiet=quiet) as counter, explained(self.settings, OF_DATA):
            counter.cell(f"{name}: the model answers")
            ready = prepare(
                self.kind,
                model,
                data=typed["data"],
                options=options,
                seed=seed,
                **{name: self.settings[name] for name in COUNTS},
                device=typed["device"],
                out=self.folder,
                prompting=self.prompting,
                continue_from=typed["continue_from"],
                on_answer=counter.at,
            )
        for note in () if quiet else ready.notes:
            terminal.note(note)
        before = steps_done(self.folder)
        with Counter("steps", ready.recipe.settings.steps, quiet=quiet) as counter, explained(self.settings):
            counter.cell(f"{name}, continuing after step {before}" if before else name)

            def on_step(done: int, figures: dict[str, float]) -> None:
                counter.at(done, "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))

            done = run_loop(
                ready.recipe,
                self.folder,
                base=Base(name=model, config=ready.loaded.model.config, fingerprint=ready.loaded.fingerprint),
                revision=ready.revision,
                command=command_line(self.kind, typed, self.prompting, ready.recipe.settings),
                evaluate=self.evaluate,
                on_step=on_step,
            )
        if not first:
            return
        if not done.improved(ready.recipe):
            figure = ready.recipe.figure
            terminal.warning(f"the held-out {figure} did not improve; train longer or with other settings.")
        if not quiet:
            _print_trained(done)
        if typed["plot"] is not None:
            draw([log_figure(self.folder / LOG, self.folder / HELD_OUT, self.kind)], typed["plot"])
        if typed["json"]:
            terminal.data(done.card | {"path": str(done.path)})

    def _say_preset(self, entry: Entry) -> None:
        """Print the description of the preset that the user named. Add a note if the preset has separate values for
        other models but none for this model."""
        if (name := self.settings["preset"]) in (None, TINY):  # the built-in model's needs no word
            return
        preset, model = entry.presets[name], self.typed["model"]
        terminal.note(f"preset {name}: {preset.about}.")
        if preset.models and not preset.names_model(model):
            chosen = ", ".join(f"{setting}={self.settings[setting]}" for setting in next(iter(preset.models.values())))
            known = ", ".join(preset.models)
            terminal.note(f"preset {name} has values for {known}, none for {bare(model)}; {chosen} is used.")

    def estimate(self) -> None:
        """Estimate a table with values for every query head of the model, and print the heads with the largest figures
        (`Estimate.heads`)."""
        model, quiet = self.typed["model"], self.typed["quiet"]
        with preparing("loading torch and transformers", quiet=quiet):
            from kvbench.train.tables import make

        samples, seed = self.settings.get("samples", TABLE_SAMPLES), self.settings["seed"]
        with Counter("samples", samples, quiet=quiet) as counter:
            counter.cell(f"{self.kind} {model}")
            chosen: dict[str, Any] = {"samples": samples, "seed": seed, "device": self.typed["device"]}
            table = make(self.kind, model, self.folder, **chosen, on_example=counter.at)
        if not quiet:
            _print_table(table)
        if self.typed["json"]:
            terminal.data(table.card | {"path": str(table.path)})


def _print_trained(done: Trained) -> None:
    """Print the recipe's figures on data that training did not use, before and after training, and the paths of the
    written files."""
    rows = [(name, f"{done.before[name]:.4g}", f"{done.after[name]:.4g}") for name in done.after]
    terminal.table(("held out", "before", "after"), rows, right=("before", "after"))
    _print_files(done.path)


def _print_table(table: Table) -> None:
    """Print the heads with the largest numbers, and the paths of the written files."""
    columns = ("layer", "query head", table.estimate.what)
    width, numbers = table.estimate.heads.shape[1], table.estimate.heads.flatten()
    first = numbers.argsort(descending=True)[:SHOWN].tolist()
    rows = [(str(index // width), str(index % width), f"{numbers[index]:.3f}") for index in first]
    terminal.table(columns, rows, right=columns)
    if len(numbers) > SHOWN:
        print(f"and {len(numbers) - SHOWN} more heads")
    _print_files(table.path)


def _print_files(path: Path) -> None:
    print(f"wrote {terminal.clean(str(path))} and {terminal.clean(path.with_suffix('.json').name)}")
