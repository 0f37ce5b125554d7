"""The options of ``kvbench run``, and how other commands take some of them (`takes`).

Options of settings are generated from the fields in `kvbench.config.settings`; all other options are declared here.
An option whose value is a number is declared as text. `kvbench.config.parsers` parses the text, so that flags, files
and environment variables have the same error messages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvbench.config import parsers, settings

Text = str | None
Texts = list[str] | None
Switch = bool | None
Parameter = inspect.Parameter


def option(
    name: str,
    kind: Any,
    help: str,
    panel: str | None = None,
    *,
    metavar: str = "",
    short: str = "",
    negative: bool = False,
    default: Any = None,
    hidden: bool = False,
) -> Parameter:
    """Return a parameter of a function's signature that typer reads as an option.

    name: the flag without hyphens. kind: the type of its value. panel: the title below which ``--help`` lists it.
    short: a second flag of one letter, such as ``-m``. negative: add the flag ``--no-NAME``. hidden: leave the option
    out of ``--help``.
    """
    word = name.replace("_", "-")
    flags = [f"--{word}/--no-{word}" if negative else f"--{word}", *([short] if short else [])]
    shown = typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, hidden=hidden)
    return declare(name, Annotated[kind, shown], default)


def declare(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a parameter for `takes`. annotation: ``Annotated`` with the type of its value and the typer option."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _of_setting(name: str) -> Parameter:
    """Return the option for a setting. name: the setting's name. The setting's parser decides whether the option is a
    switch, a text or a repeatable text."""
    field = settings.SETTINGS[name]
    parser, help, panel, metavar = (field.metadata[key] for key in ("parser", "help", "panel", "metavar"))
    if parser is parsers.flag:
        return option(name, Switch, help, panel, negative=field.default is None)
    kind = Texts if parser in (parsers.files, parsers.strings, parsers.assignments) else Text
    return option(name, kind, help, panel, metavar=metavar)


_WHAT, _DRAW, _SCORING, _ENGINE, _RESULTS = (
    part.keywords["panel"]
    for part in (settings.what, settings.sampling, settings.scoring, settings.engine, settings.results)
)
_OPTIONS = [
    option(
        "method",
        Texts,
        "Methods; A+B: A evicts the prompt, B generated tokens. Repeatable.",
        _WHAT,
        metavar="NAME",
        short="-m",
    ),
    option(
        "budget",
        Texts,
        "KV entries per layer and head after an eviction, or a share of the prompt (25%); repeatable.",
        _WHAT,
        metavar="N",
        short="-b",
    ),
    option("task", Texts, "Names of tasks, repeatable or with commas.", _WHAT, metavar="NAME", short="-t"),
    option("method_opt", Texts, "An option of a method; repeatable.", _WHAT, metavar="[METHOD.]NAME=VALUE"),
    option(
        "protect",
        Texts,
        "Entries that methods protect from eviction, as in prompt+sinks=4+recent=64. none: no entries. own: each "
        "method keeps its own protection. Repeatable.",
        _WHAT,
        metavar="WHAT",
    ),
    *map(_of_setting, settings.SETTINGS),
    option("suite", Text, "Name of a suite ('kvbench list suites' shows them), or a TOML file.", _WHAT, metavar="NAME"),
    option("config", Text, "TOML file with settings; flags override it.", _WHAT, metavar="FILE"),
    option(
        "allow_duplicate_samples",
        bool,
        "Allow several samples at temperature 0, although they are all equal.",
        _DRAW,
        default=False,
    ),
    option("judge_key", Text, "", _SCORING, hidden=True),
    option("batch_size", Text, "The same as --slots.", _ENGINE, metavar="N"),
    option(
        "executor",
        str,
        "local: processes of this machine; ray: actors of a Ray cluster; slurm: jobs of a Slurm array. Default: local.",
        _ENGINE,
        metavar="WHERE",
        default="local",
    ),
    option(
        "workers",
        Text,
        "Workers that share the run. Default: one per GPU; on CPUs one, or up to four for a long run of a small model.",
        _ENGINE,
        metavar="N",
    ),
    option(
        "address",
        Text,
        "Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Default: a new cluster on this machine.",
        _ENGINE,
        metavar="ADDRESS",
    ),
    option(
        "slurm",
        Texts,
        "An option of sbatch for every Slurm job, as in partition=gpu,time=240 (minutes). Repeatable.",
        _ENGINE,
        metavar="NAME=VALUE",
    ),
    option(
        "print_sbatch", bool, "Print a Slurm script that runs this command in shards, and end.", _ENGINE, default=False
    ),
    option("out", str, "Folder of all runs. Default: results.", _RESULTS, metavar="DIR", default="results"),
    option("run_name", Text, "Name of the run's folder; the same name continues the run.", _RESULTS, metavar="NAME"),
    option("resume", Text, "Continue a run with its own settings.", _RESULTS, metavar="NAME"),
    option(
        "shard",
        Text,
        "Run only the I-th of N parts of the run, in a folder of its own; 'kvbench join' joins the parts.",
        _RESULTS,
        metavar="I/N",
    ),
    option("dry_run", bool, "Print the plan; generate nothing.", _RESULTS, default=False),
    option(
        "allow_version_change",
        bool,
        "Continue a run made with other versions, or with other code of its methods.",
        _RESULTS,
        default=False,
    ),
    option("take_over", bool, "Take over a run that a process on another host has locked.", _RESULTS, default=False),
    option("json", bool, "Last line of stdout is one JSON document.", default=False),
    option("quiet", bool, "Print no progress and no tables.", short="-q", default=False),
    option("verbose", bool, "Print the source of each setting.", short="-v", default=False),
]
OPTIONS = {option.name: option for option in _OPTIONS}


def group(about: str) -> typer.Typer:
    """Return a command without subcommands, to which subcommands can be added. If the user calls this command without a
    subcommand, the command prints its help. about: the help text."""
    app = typer.Typer(help=about, invoke_without_command=True)

    @app.callback()
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return app


def plain(flags: str, help: str, metavar: str = "") -> Any:
    """Return a typer option for use inside ``Annotated``. ``--help`` lists it outside the titled panels. flags: the
    names of the option, separated by blanks."""
    return typer.Option(*flags.split(), help=help, metavar=metavar, show_default=False)


def same_as_run(name: str) -> Any:
    """Return a typer option for a setting, as `plain` does, with the same help text as in ``kvbench run``."""
    field = settings.SETTINGS[name].metadata
    metavar = "" if field["parser"] is parsers.flag else field["metavar"]
    return plain(f"--{name.replace('_', '-')}", field["help"], metavar)


Plugins = Annotated[Texts, same_as_run("plugin")]
DataRevision = Annotated[Text, same_as_run("data_revision")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of all runs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name.", show_default=False)]
Document = Annotated[bool, plain("--json", "One JSON document on stdout.")]
LastLine = Annotated[bool, plain("--json", "Last line of stdout is one JSON document.")]


def takes(*options: str | Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command: options of ``kvbench run``, by name, and others, as `declare`
    returns them. The command gets the values of all these options in the argument `typed`, by name; an option that the
    user did not type has its default, mostly None."""
    added = [OPTIONS[option] if isinstance(option, str) else option for option in options]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "typed"]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            typed = {p.name: values.pop(p.name, p.default) for p in added}
            return command(**values, typed=typed)

        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        return run

    return decorate
