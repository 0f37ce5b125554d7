"""Lists the commands, each with one line for `kvbench --help`. A command's module is imported when the command is
called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class Entry:
    """One command. where: MODULE.NAME, a module in `kvbench.cli.commands` and a function or Typer app in this module.
    about: the command's line in `kvbench --help`.
    """

    where: str
    about: str


COMMANDS = {
    "run": Entry(
        "run.run",
        "Run methods at budgets on tasks: every method at every budget on every task, on the same questions.",
    ),
    "join": Entry(
        "join.join",
        "Join the shards of a run ('kvbench run --shard') into one run; join again when more rows are there.",
    ),
    "list": Entry(
        "list.list_",
        "List methods, tasks, recipes, models, suites or runs; with a name, show one in full, with its defaults.",
    ),
    "show": Entry(
        "show.show_",
        "Show a run: its settings, how complete it is, and with --sample the prompt, output and scores of a question.",
    ),
    "report": Entry(
        "report.report",
        "Tables of quality, memory and speed: each method at each budget, with error bars and paired comparisons.",
    ),
    "compare": Entry(
        "compare.compare",
        "Test whether NEW is worse than BASE: by equality where answers must be equal, otherwise by paired tests.",
    ),
    "repair": Entry(
        "repair.repair",
        "Rebuild the tables of a run from its journal, after damage to rows.parquet or texts.parquet.",
    ),
    "score": Entry("score.score", "Score the stored answers of a run."),
    "record": Entry(
        "record.record",
        "Record which tokens each method kept at each eviction, for the first questions of a run.",
    ),
    "bench": Entry(
        "bench.bench",
        "Measure decoding speed with random weights: methods, baselines, and the share of the hardware limit.",
    ),
    "replay": Entry(
        "replay.replay",
        "Compare methods token by token on finished answers: how much eviction raises the loss, without any sampling.",
    ),
    "data": Entry("data.app", "Download the data of tasks, check them, or show their paths."),
    "doctor": Entry(
        "doctor.doctor",
        "Check this machine: versions, devices, memory, threads, the built-in model, data and results folders.",
    ),
    "audit": Entry(
        "audit.audit",
        "Check on small models that methods keep the engine's invariants: budget, memory, batches, positions.",
    ),
    "train": Entry(
        "train.train",
        "Train what a method needs for a model, or estimate a number for every head from the model's attention.",
    ),
    "weights": Entry("weights.app", "Trained weights of methods: import published checkpoints."),
    "lm-eval": Entry(
        "lm_eval.lm_eval",
        "Run lm-eval's command. Its default model is kvbench's engine, under an eviction method.",
    ),
}


def load(name: str, group: type[Any]) -> Any:
    """Import a command's module and return the command. group: the class to use for a command with subcommands."""
    file, _, member = COMMANDS[name].where.partition(".")
    module = importlib.import_module(f"kvbench.cli.commands.{file}")
    command = getattr(module, member)
    holder = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name, cls=group, epilog=flowing(module.EPILOG))
    else:
        holder.command(name, epilog=flowing(module.EPILOG), context_settings=getattr(module, "CONTEXT", None))(command)
    return typer.main.get_group(holder).commands[name]


def flowing(epilog: str) -> str:
    """Return the text below a command's options in the form that --help needs. A paragraph of prose becomes one line,
    which --help breaks at the terminal's width. Examples keep their line ends. The text begins with an empty line,
    without which typer would remove the indentation of examples."""
    paragraphs = epilog.strip().split("\n\n")
    return "\n" + "\n\n".join(text if "\n " in text else text.replace("\n", " ") for text in paragraphs)
