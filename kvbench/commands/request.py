"""From what was typed to a RunConfig: names through the registries, values through their parsers. No torch.

    build(gathered, problems) -> RunConfig | None

Every problem goes to `problems`; None means that there was no grid to make. What the parts mean together (budget
against model, samples against temperature) is checked in `kvbench.commands.checks`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.config import OPERATIONAL, PARSERS, Grid, MethodChoice, RunConfig
from kvbench.errors import UserError, show
from kvbench.eviction.options import describe, parse_options, split_option, values
from kvbench.problems import Problems
from kvbench.settings import Gathered, Given, Layer
from kvbench.store import list_runs, manifest
from kvbench.values import budget, parse, split
from kvbench.work import load_task

KEEPS = "A resumed run keeps its settings."
MISSING = {
    "method": "Give a method name; 'kvbench list methods' shows them.",
    "task": "Give a task name; 'kvbench list tasks' shows them.",
    "budget": "Example: --budget 512.",
}


def build(gathered: Gathered, problems: Problems) -> RunConfig | None:
    return _Builder(gathered, problems).config()


def resumed(out: Path, name: str, gathered: Gathered, problems: Problems) -> RunConfig:
    """The settings of an existing run. Flags and environment variables must not differ from them."""
    if gathered.files:
        raise UserError(f"--suite and --config cannot be given with --resume. {KEEPS}")
    if (options := gathered.typed("method_opt")) is not None:
        raise UserError(f"{options.source} cannot be given with --resume. {KEEPS}")
    folder = out / name
    if not (folder / manifest.NAME).is_file():
        there = ", ".join(list_runs(out))
        known = f"Runs there: {there}." if there else "There are no runs there."
        raise UserError(f"no run {show(name)} in {show(out)[1:-1]}. {known}")
    record = manifest.read(folder)
    stored = record["config"] | {key: record["environment"].get(key) for key in OPERATIONAL}
    home = {k: os.path.expanduser(v) for k, v in stored.items() if isinstance(v, str)}
    config = RunConfig.from_dict(stored | home)
    for key in PARSERS:
        if given := gathered.typed(key):
            value, kept = parse(given.source, PARSERS[key], given.value), getattr(config, key)
            if key in OPERATIONAL:
                config = dataclasses.replace(config, **{key: value})
            elif value != kept:
                raise UserError(f"{_said(given, value)} differs from the run's {kept}. {KEEPS}")
    typed = _Builder(gathered, problems)
    for key, kept in (("method", [m.name for m in config.methods]), ("budget", config.budgets), ("task", config.tasks)):
        if given := gathered.typed(key):
            members = [m[0] if isinstance(m, tuple) else m for m in typed.axis({}, key)]
            if members and set(members) != set(kept):
                asked, were = ",".join(map(str, members)), ",".join(map(str, kept))
                raise UserError(f"{_said(given, asked)} differs from the run's {were}. {KEEPS}")
    return config


def _said(given: Given, value: Any) -> str:
    """``--seed 2`` or ``environment variable KVBENCH_SEED=2``."""
    return f"{given.source}{' ' if given.source.startswith('--') else '='}{value}"


class _Builder:
    def __init__(self, gathered: Gathered, problems: Problems) -> None:
        self.gathered, self.problems = gathered, problems
        self.settings: dict[str, Any] = {}
        self.options: list[tuple[str | None, str, str]] = []  # (method or None for all, option, value)

    def config(self) -> RunConfig | None:
        for name, parser in PARSERS.items():
            if (given := self.gathered.first(name)) is not None:
                with self.problems.collect():
                    self.settings[name] = parse(given.source, parser, given.value)
        if (options := self.gathered.first("method_opt")) is not None:
            self._read_options(options)
        before = len(self.problems.errors)
        grids = [self._grid(block) for block in self.gathered.blocks or [{}]]
        if len(self.problems.errors) > before:
            return None
        with self.problems.collect():
            self._check_option_methods(grids)
            return RunConfig(grids=self._selected(grids), **self.settings)
        return None

    def _grid(self, block: Layer) -> Grid:
        """One grid block; an axis that it does not have is the run's."""
        names, budgets, tasks = self.axis(block, "method"), self.axis(block, "budget"), self.axis(block, "task")
        methods = []
        for name, pairs in names:
            with self.problems.collect():
                methods.append(self._choose(name, list(pairs), [n for n, _ in names]))
        limit = None
        if given := block.get("limit"):
            with self.problems.collect():
                limit = parse(given.source, PARSERS["limit"], given.value)
        return Grid(methods=tuple(methods), budgets=tuple(budgets), tasks=tuple(tasks), limit=limit)

    def axis(self, block: Layer, key: str) -> list[Any]:
        """The members of an axis, each once."""
        given = self._given(block, key)
        if given is None and key == "budget":
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
                    member = self._member(key, given.source, typed, position if len(raw) > 1 else None)
                    if member in members:
                        name = show(member[0] if isinstance(member, tuple) else member)
                        self.problems.warn(f"{key} {name} is given twice; it runs once.")
                    else:
                        members.append(member)
        return members

    def _member(self, key: str, source: str, typed: Any, entry: int | None) -> Any:
        """A budget, a task's name, or a method's name with the options that a file gives beside it."""
        if key == "budget":
            return parse(source, lambda raw: budget(raw, entry), typed)
        if key == "task":
            return self._task_name(typed)
        if isinstance(typed, dict):
            options = tuple((name, str(value)) for name, value in typed.items() if name != "name")
            return registry.methods.canonical(str(typed.get("name", ""))), options
        return registry.methods.canonical(str(typed)), ()

    def _given(self, block: Layer, key: str) -> Given | None:
        """A flag beats a block, a block beats the run's settings; --task selects among the blocks, see `_selected`."""
        if key == "task" and key in block:
            return block[key]
        return self.gathered.typed(key) or block.get(key) or self.gathered.first(key)

    def _selected(self, grids: list[Grid]) -> tuple[Grid, ...]:
        """With --task, only those tasks of the blocks."""
        wanted = self.gathered.typed("task")
        if wanted is None or not any("task" in block for block in self.gathered.blocks):
            return tuple(grids)
        tasks = [self._task_name(name) for name in split(wanted.source, wanted.value, MISSING["task"])]
        known = list(dict.fromkeys(task for grid in grids for task in grid.tasks))
        for task in tasks:
            if task not in known:
                raise UserError(
                    f"{wanted.source} {show(task)} is in no [[grid]] of the file, which has {', '.join(known)}."
                )
        kept = (dataclasses.replace(g, tasks=tuple(t for t in g.tasks if t in tasks)) for g in grids)
        return tuple(grid for grid in kept if grid.tasks)

    def _task_name(self, name: Any) -> str:
        return load_task(str(name), self.settings.get("task_file")).name

    def _read_options(self, given: Given) -> None:
        for text in given.value if isinstance(given.value, (list, tuple)) else [given.value]:
            with self.problems.collect():
                method, name, value = split_option(str(text))
                self.options.append((registry.methods.canonical(method) if method else None, name, value))

    def _choose(self, name: str, pairs: list[tuple[str, str]], names: list[str]) -> MethodChoice:
        """A method with its options. An option without a method's name goes to every method of the grid that has it."""
        cls = registry.methods.get(name)
        for method, option, value in self.options:
            anyone = [n for n in names if _has(n, option)]
            takes = name == method if method else name in anyone if anyone else name == _last_evicting(names)
            if takes:
                pairs = [*pairs, (option, value)]
        chosen, default = values(parse_options(name, cls, pairs)), values(cls())
        return MethodChoice(name=name, options=tuple((k, v) for k, v in chosen.items() if v != default[k]))

    def _check_option_methods(self, grids: list[Grid]) -> None:
        present = {method.name for grid in grids for method in grid.methods}
        for method, _, _ in self.options:
            if method and method not in present:
                raise UserError(f"--method-opt is for method {show(method)}, which is not in this run.")


def _has(method: str, option: str) -> bool:
    return any(info.name == option for info in describe(registry.methods.get(method)))


def _last_evicting(names: list[str]) -> str:
    """The method that complains about an option which none has."""
    return next((n for n in reversed(names) if MethodChoice(name=n).evicts), names[-1])
