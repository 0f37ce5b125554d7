"""Turns gathered settings into a RunConfig. Names are looked up in the registries, and values are parsed. No torch.

`kvbench.cli.checks` then checks settings against each other, such as the number of samples against the temperature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.config.layers import Gathered, Given, Layer, gather
from kvbench.config.parsers import budget, parse, protection, split
from kvbench.config.plugins import load_plugins
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.config.settings import DEFAULTS, PARSERS, PER_TASK
from kvbench.console.problems import Problems
from kvbench.console.redact import holds_secret
from kvbench.errors import UserError, bare, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget, label
from kvbench.eviction.options import split_option
from kvbench.eviction.protection import OWN
from kvbench.runner.workload import expand_task

MISSING = {
    "method": "Give a method name; 'kvbench list methods' shows them.",
    "task": "Give a task name; 'kvbench list tasks' shows them.",
    "budget": "Example: --budget 512.",
    "interval": "Example: --interval 128.",
}


def build(gathered: Gathered, problems: Problems) -> RunConfig | None:
    """Turn gathered settings into a configuration. Errors go to `problems`.

    If the value of a setting is invalid (--seed x), the configuration lacks this setting, so that later checks can find
    more errors. After other errors, such as an unknown method or an invalid interval, the result is None.
    """
    given = gathered.first("plugin")
    before = len(problems.errors)
    with problems.collect():
        refuse_secrets(gathered)
    if given is not None and len(problems.errors) == before:
        with problems.collect():
            load_plugins(parse(given.source, PARSERS["plugin"], given.value))
    # If a plug-in failed, all its names would be unknown: report only the cause.
    return Builder(gathered, problems).config() if len(problems.errors) == before else None


def chosen(flags: Mapping[str, Any], problems: Problems) -> tuple[tuple[MethodChoice, ...], tuple[Budget, ...]]:
    """Return the methods, with their options, and the budgets that the user typed, for a command that runs no task.
    flags: the typed values of --method, --budget and --method-opt. Errors go to `problems`."""
    builder = Builder(gather(flags, {}), problems)
    if (options := builder.gathered.first("method_opt")) is not None:
        builder.read_options(options)
    before = len(problems.errors)
    [methods], budgets = builder.methods([{}]), builder.axis({}, "budget")
    if len(problems.errors) == before:
        with problems.collect():
            builder.check_option_methods(methods)
    return tuple(methods), tuple(budgets)


def refuse_secrets(gathered: Gathered) -> None:
    """Raise UserError if a setting contains what looks like a key or a password: a run's record would store the
    setting."""
    layers = (*gathered.files, *gathered.blocks, gathered.variables, gathered.flags)
    for given in (given for layer in layers for given in layer.values()):
        if holds_secret(given.value):
            raise UserError(
                f"{given.source} looks like a key, or an address with a password, which would be stored with the run's "
                "settings. Put it in an environment variable: HF_TOKEN for the hub, --judge-key-env NAME for a judge."
            )


def member_name(member: Any) -> str:
    """Return the name of a member of an axis as the user types it; a method's name comes without its options. member: a
    task, a budget, an interval, or a method's (name, options)."""
    return member if isinstance(member, str) else label(member) if not isinstance(member, tuple) else str(member[0])


class Builder:
    """Builds a RunConfig from gathered settings. The axes of a grid are `method`, `budget`, `interval` and `task`."""

    def __init__(self, gathered: Gathered, problems: Problems) -> None:
        self.gathered, self.problems = gathered, problems
        self.settings: dict[str, Any] = {}
        self.options: list[tuple[str | None, str, str]] = []  # (method or None for all, option, value)

    def config(self) -> RunConfig | None:
        for name, parser in PARSERS.items():
            if name != "interval" and (given := self.gathered.first(name)) is not None:
                with self.problems.collect():
                    self.settings[name] = parse(given.source, parser, given.value)
        if "plugin" in self.settings:  # absolute, as a run may be continued from another folder
            self.settings["plugin"] = tuple(str(Path(p).expanduser().resolve()) for p in self.settings["plugin"])
        if (options := self.gathered.first("method_opt")) is not None:
            self.read_options(options)
        before = len(self.problems.errors)
        if intervals := self.axis({}, "interval"):
            self.settings["interval"] = intervals[0]
        blocks = self.gathered.blocks or [{}]
        grids = [self._grid(block, methods) for block, methods in zip(blocks, self.methods(blocks))]
        if len(self.problems.errors) > before:
            return None
        with self.problems.collect():
            self.check_option_methods([method for grid in grids for method in grid.methods])
            selected = self._selected(grids)
            self._check_task_file(selected)
            return RunConfig(grids=selected, **self.settings)
        return None

    def _check_task_file(self, grids: Sequence[Grid]) -> None:
        """Raise UserError if the user typed --task-file, but no grid has the task in this file."""
        given = self.gathered.typed("task_file")
        if given is None or "task_file" not in self.settings:
            return
        [own] = self._task_names("file")
        tasks = list(dict.fromkeys(task for grid in grids for task in grid.tasks))
        if own not in tasks:
            raise UserError(
                f"{given.source} {quote(given.value)} holds task {quote(own)}, but the run has only the tasks "
                f"{', '.join(tasks)}. Add {bare(own)} to --task, or leave out {given.source}."
            )

    def _grid(self, block: Layer, methods: list[MethodChoice]) -> Grid:
        """Return the grid of one ``[[grid]]`` block with these methods. `_given` decides whether the block or the run's
        settings give an axis (`method`, `budget`, `interval` or `task`)."""
        budgets, tasks = self.axis(block, "budget"), self.axis(block, "task")
        intervals = tuple(self.axis(block, "interval"))
        if intervals == (self.settings.get("interval", DEFAULTS["interval"]),):
            intervals = ()
        own: dict[str, Any] = {}
        for name in PER_TASK:
            if (given := block.get(name)) and self.gathered.over_blocks(name) is None:
                with self.problems.collect():
                    own[name] = parse(given.source, PARSERS[name], given.value)
        return Grid(methods=tuple(methods), budgets=tuple(budgets), tasks=tuple(tasks), intervals=intervals, **own)

    def methods(self, blocks: Sequence[Layer]) -> list[list[MethodChoice]]:
        """Return the methods of each ``[[grid]]`` block with their options."""
        axes = [self.axis(block, "method") for block in blocks]
        names = [name for axis in axes for name, _ in axis]
        return [self._methods(block, axis, names) for block, axis in zip(blocks, axes)]

    def _methods(self, block: Layer, axis: list[Any], names: list[str]) -> list[MethodChoice]:
        """Return the methods of one ``[[grid]]`` block, whose axis `method` is given, with their options. names: the
        methods of all blocks.

        A method is returned once for every protection that applies to the block. A method that takes no budget, or
        whose options state a protection, is returned only once.
        """
        methods = []
        given = self._given(block, "protect") or Given(OWN, "--protect")
        for name, pairs in axis:
            with self.problems.collect():
                choice = self._choose(name, list(pairs), names)
                for typed in given.value if isinstance(given.value, (list, tuple)) else [given.value]:
                    methods.append(choice.under(parse(given.source, protection, typed), given.source))
        return list(dict.fromkeys(methods))

    def axis(self, block: Layer, key: str) -> list[Any]:
        """Return one axis of a ``[[grid]]`` block, each member once. key: "method", "budget", "interval" or "task". The
        result is empty if nothing gives the axis; for methods and tasks this is an error. Errors go to `problems`."""
        given = self._given(block, key)
        if given is None and key in ("budget", "interval"):
            return []
        if given is None and key == "task" and self.settings.get("task_file"):
            given = Given("file", "--task-file")
        if given is None:
            self.problems.errors.append(UserError(f"--{key} is missing. {MISSING[key]}"))
            return []
        members: list[Any] = []
        with self.problems.collect():
            raw = split(given.source, given.value, MISSING[key])
            for position, typed in enumerate(raw, 1):
                with self.problems.collect():
                    for member in self._members(key, given.source, typed, position if len(raw) > 1 else None):
                        if any(member == other and type(member) is type(other) for other in members):
                            self.problems.warn(f"{key} {quote(member_name(member))} is given twice; it runs once.")
                        else:
                            members.append(member)
        return members

    def _members(self, key: str, source: str, typed: Any, entry: int | None) -> list[Any]:
        """Return the members that one item of an axis names: a budget, an interval, one or more tasks, or a method's
        (name, options). key: the name of the axis. source: where the user gave the item, for messages. typed: the item
        as the user gave it. entry: the item's place in the user's list, counted from 1, for messages; None if the user
        gave a single item."""
        if key == "budget":
            return [parse(source, lambda raw: budget(raw, entry), typed)]
        if key == "interval":
            return [parse(source, PARSERS[key], typed)]
        if key == "task":
            return self._task_names(typed)
        if isinstance(typed, dict):
            options = tuple((name, value) for name, value in _flat(typed) if name != "name")
            return [(choose.canonical(str(typed.get("name", ""))), options)]
        return [(choose.canonical(str(typed)), ())]

    def _given(self, block: Layer, key: str) -> Given | None:
        """Return the value of an axis for a ``[[grid]]`` block. A flag, an environment variable or a later file
        overrides the block, and the block overrides its own file's settings outside the blocks.

        For tasks the block overrides everything: --task does not replace the tasks of blocks but selects among them.
        """
        if key == "task" and key in block:
            return block[key]
        return self.gathered.over_blocks(key) or block.get(key) or self.gathered.first(key)

    def _selected(self, grids: list[Grid]) -> tuple[Grid, ...]:
        """Return the grids of all ``[[grid]]`` blocks. If --task or a later file names tasks, keep only these. Raises
        UserError for a named task that no block has."""
        wanted = self.gathered.over_blocks("task")
        if wanted is None or not any("task" in block for block in self.gathered.blocks):
            return tuple(grids)
        names = split(wanted.source, wanted.value, MISSING["task"])
        tasks = [task for name in names for task in self._task_names(name)]
        known = list(dict.fromkeys(task for grid in grids for task in grid.tasks))
        for task in tasks:
            if task not in known:
                raise UserError(
                    f"no [[grid]] of the file has task {quote(task)} ({wanted.source}). The file has the tasks "
                    f"{', '.join(known)}."
                )
        kept = (dataclasses.replace(g, tasks=tuple(t for t in g.tasks if t in tasks)) for g in grids)
        return tuple(grid for grid in kept if grid.tasks)

    def _task_names(self, name: Any) -> list[str]:
        return expand_task(str(name), self.settings.get("task_file"))

    def read_options(self, given: Given) -> None:
        for text in given.value if isinstance(given.value, (list, tuple)) else [given.value]:
            with self.problems.collect():
                method, name, value = split_option(str(text))
                self.options.append((choose.canonical(method) if method else None, name, value))

    def _choose(self, name: str, pairs: list[tuple[str, str]], names: list[str]) -> MethodChoice:
        """Return a method with its options. pairs: the options in its ``[[grid]]`` block. names: the methods of
        all blocks.

        An option that was typed without a method's name applies to all methods that have it. A typed option replaces
        the option of the same name in the block.
        """
        own = [pair for option, value in pairs for pair in choose.addressed(name, option, value)]
        typed: list[tuple[str, str]] = []
        for method, option, value in self.options:
            anyone = [n for n in names if choose.takers(n, option)]
            if method:
                takes = method == name or method in name.split("+")
            else:
                takes = name in anyone if anyone else name == _last_evicting(names)
            if takes:
                typed += choose.addressed(name, f"{method}.{option}" if method and method != name else option, value)
        given = [(option, value) for option, value in own if option not in dict(typed)] + typed
        return MethodChoice(name=name, options=choose.changed(name, choose.parse(name, given)))

    def check_option_methods(self, methods: Sequence[MethodChoice]) -> None:
        present = {n for m in methods for n in (m.name, *m.name.split("+"))}
        for method, _, _ in self.options:
            if method and method not in present:
                raise UserError(f"--method-opt names method {quote(method)}, but this run does not have the method.")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a method's options in a TOML file as (name, text). TOML reads ``gkv.alpha = 0.9`` as a nested table; here
    the option gets the name "gkv.alpha"."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def _last_evicting(names: list[str]) -> str:
    """Return the last method that takes a budget or, if no method takes a budget, the last method. If the user gives an
    option that none of the methods has, the error names this method."""
    return next((n for n in reversed(names) if MethodChoice(name=n).takes_budget), names[-1])
