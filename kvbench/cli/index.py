"""Lists the commands, each with one line for `kvbench --help`. A command's module is imported when the command is
called."""

from __future__ import annotations

import importlib
from typing import Any

import typer

# For each command its line in `kvbench --help`: the first paragraph of the command's help text.
COMMANDS = {
    "run": "Run methods at budgets on tasks: every method at every budget on every task, on the same questions.",
    "join": "Join the shards of a run ('kvbench run --shard') into one run; join again when more rows are there.",
    "list": "List methods, tasks, recipes, models, suites or runs; with a name, show one in full, with its defaults.",
    "show": (
        "Show a run: its settings, how complete it is, and with --sample the prompt, output and scores of a question."
    ),
    "report": (
        "Tables of quality, memory and speed: each method at each budget, with error bars and paired comparisons."
    ),
    "compare": (
        "Test whether NEW is worse than BASE: by equality where answers must be equal, otherwise by paired tests."
    ),
    "repair": "Rebuild the tables of a run from its journal, after damage to rows.parquet or texts.parquet.",
    "score": "Score the stored answers of a run.",
    "record": "Record which tokens each method kept at each eviction, for the first questions of a run.",
    "bench": "Measure decoding speed with random weights: methods, baselines, and the share of the hardware limit.",
    "replay": (
        "Compare methods token by token on finished answers: how much eviction raises the loss, without any sampling."
    ),
    "data": "Download the data of tasks, check them, or show their paths.",
    "doctor": "Check this machine: versions, devices, memory, threads, the built-in model, data and results folders.",
    "audit": "Check on small models that methods keep the engine's invariants: budget, memory, batches, positions.",
    "train": "Train what a method needs for a model, or estimate a number for every head from the model's attention.",
    "weights": "Trained weights of methods: import published checkpoints.",
    "lm-eval": "Run lm-eval's command. Its default model is kvbench's engine, under an eviction method.",
}
# A command's function or Typer app in its module, unless it has the name of the module.
MEMBERS = {"list": "list_", "show": "show_", "data": "app", "weights": "app"}


def load(name: str, group: type[Any]) -> Any:
    """Import a command's module and return the command. group: the class to use for a command with subcommands."""
    file = name.replace("-", "_")
    module = importlib.import_module(f"kvbench.cli.commands.{file}")
    command = getattr(module, MEMBERS.get(name, file))
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
