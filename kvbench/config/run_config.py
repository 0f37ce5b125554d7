"""The configuration of a run: frozen dataclasses, checked at construction, with a hash that identifies the run.

Names of methods and tasks are spelled as in the registries. `kvbench.config.layers` gathers the settings from files,
environment variables and flags. The run command makes a RunConfig from these settings, and checks whether each budget
fits its method and the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvbench import registry
from kvbench.config.parsers import budget, parse, unknown_key
from kvbench.config.settings import DEFAULTS, OPERATIONAL, PARSERS, PER_TASK, Settings
from kvbench.errors import UserError, quote, shown
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget, label, order
from kvbench.eviction.options import OptionError
from kvbench.eviction.protection import OWN
from kvbench.task import Services

Value = bool | int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """A method, or two methods joined by ``+``, with the options that differ from their defaults, sorted by name."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options)))

    @property
    def label(self) -> str:
        """The method as tables show it: ``gkv`` or ``snapkv-decode(variant=gkv)``."""
        options = ", ".join(f"{k}={v}" for k, v in self.options)
        return f"{self.name}({options})" if options else self.name

    def under(self, protection: str, source: str) -> MethodChoice:
        """Return the method with `protection` as its option (`kvbench.eviction.protection`). A method that takes no
        budget, or whose options state a protection, is returned unchanged.

        If `protection` is "own", every method is returned unchanged. Raises UserError if the method does not support
        this protection. source: where the user gave the protection, for the message.
        """
        named = any(option.rpartition(".")[2] == "protection" for option, _ in self.options)
        if protection == OWN or named or not self.takes_budget:
            return self
        options = dict(self.options) | dict(choose.addressed(self.name, "protection", protection))
        try:
            method = choose.make(self.name, options)
        except OptionError as error:
            raise UserError(f"{source} does not fit method {quote(self.name)}: the protection {error.reason}") from None
        return MethodChoice(name=self.name, options=choose.changed(self.name, method))

    @property
    def evicts(self) -> bool:
        """Whether the method evicts at all. False for the full cache."""
        return "+" in self.name or bool(registry.methods.get(self.name)(**dict(self.options)).evicts)

    @property
    def takes_budget(self) -> bool:
        """Whether the method needs a budget. The full cache and methods whose options set the size of the cache need
        no budget; ``+`` cannot join them to another method."""
        return "+" in self.name or bool(registry.methods.get(self.name)(**dict(self.options)).takes_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One method at one budget and interval on one task. interval: None means the run's interval."""

    method: MethodChoice
    budget: Budget | None
    task: str
    interval: int | None = None

    @property
    def label(self) -> str:
        """The cell as messages name it: ``walk gkv @48``, ``walk gkv @25%`` or ``walk gkv @48 every 256``."""
        size = "" if self.budget is None else f" @{label(self.budget)}"
        return f"{self.task} {self.method.label}{size}" + ("" if self.interval is None else f" every {self.interval}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A block of cells: every method at every budget and interval on every task. A method without a budget has one cell
    per task and interval; the full cache has one cell per task.

    intervals: empty if the run's interval applies. limit: the number of questions per task. prompt_style: the wording
    of the questions. If `limit` or `prompt_style` is None, the run's setting of that name applies.
    """

    methods: tuple[MethodChoice, ...]
    tasks: tuple[str, ...]
    budgets: tuple[Budget, ...] = ()
    intervals: tuple[int, ...] = ()
    limit: int | None = None
    prompt_style: str | None = None

    def cells(self, own: int) -> list[Cell]:
        """Return the cells of the grid. own: the run's interval. A cell at this interval gets `interval=None`."""
        intervals = [None if interval == own else interval for interval in self.intervals or (own,)]
        return [
            Cell(method=method, budget=size, task=task, interval=interval)
            for task in self.tasks
            for method in self.methods
            for interval in (intervals if method.evicts else (None,))
            for size in (self.budgets if method.takes_budget else (None,))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Settings):
    """The configuration of one run: its settings, and its grids of methods, budgets and tasks."""

    grids: tuple[Grid, ...]
    moved_to: str | None = None  # a resumed run reads its model from this folder; rows and record still state `model`

    def __post_init__(self) -> None:
        for name, parser in PARSERS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse(f"'{name}'", parser, value))
        for grid in self.grids:
            for size in grid.budgets:
                parse("'budget'", budget, label(size))
            for interval in grid.intervals:
                parse("'interval'", PARSERS["interval"], interval)
        for name in PER_TASK:
            self._check_one_per_task(name)

    def _check_one_per_task(self, name: str) -> None:
        """Raise UserError if a grid has an invalid value of the setting `name`, or if two grids with the same task
        state different values of this setting. Two grids also differ if only one of them states a value. name: one of
        `PER_TASK`, the settings that a grid may state for its tasks."""
        values: dict[str, Any] = {}
        for grid in self.grids:
            value = getattr(grid, name)
            if value is not None:
                parse(f"'{name}'", PARSERS[name], value)
            for task in grid.tasks:
                if values.setdefault(task, value) != value:
                    two = f"two values of {quote(name)}: {shown(values[task])} and {shown(value)}"
                    raise UserError(f"task {quote(task)} has {two}. Give this task the same value in all grids.")

    def cells(self) -> tuple[Cell, ...]:
        """Return the cells of all grids, each once."""
        cells = [cell for grid in self.grids for cell in grid.cells(self.interval)]
        return tuple({(cell, cell.label): cell for cell in cells}.values())

    def interval_of(self, cell: Cell) -> int:
        return self.interval if cell.interval is None else cell.interval

    def limit_for(self, task: str) -> int | None:
        """Return how many questions of a task the run asks; None: all questions."""
        return cast(int | None, self.for_task("limit", task))

    def prompt_style_for(self, task: str) -> str | None:
        """Return the name of the wording (prompt style) of a task's questions; None: the task's own wording."""
        return cast(str | None, self.for_task("prompt_style", task))

    def for_task(self, name: str, task: str) -> Any:
        """Return the value of a setting in `PER_TASK` for a task: the value of the task's grid or, if the grid states
        none, the run's."""
        given = (getattr(grid, name) for grid in self.grids if task in grid.tasks)
        return next((value for value in given if value is not None), getattr(self, name))

    def services(self) -> Services:
        """Return the settings of judge and sandbox that scoring needs."""
        return Services(
            judge=self.judge,
            judge_model=self.judge_model,
            judge_key_env=self.judge_key_env,
            judge_mode=self.judge_mode,
            unsafe_code=self.unsafe_run_code,
        )

    @property
    def model_place(self) -> str:
        """The folder or hub name from which the model is read."""
        return self.moved_to or self.model

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task for grid in self.grids for task in grid.tasks))

    @property
    def methods(self) -> tuple[MethodChoice, ...]:
        return tuple(dict.fromkeys(method for grid in self.grids for method in grid.methods))

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(sorted({label(size): size for grid in self.grids for size in grid.budgets}.values(), key=order))

    @property
    def intervals(self) -> tuple[int, ...]:
        return tuple(sorted({interval for grid in self.grids for interval in grid.intervals or (self.interval,)}))

    def hash(self) -> str:
        """Return a hash (16 hex digits) of the cells and of the settings that a continued run must keep.

        The order of the cells does not matter. A setting with its default value does not enter the hash, so that a
        later version can add a setting without changing earlier hashes; only `limit` always enters it.
        """
        free = ("grids", *OPERATIONAL)
        identity = {k: v for k, v in self.to_dict().items() if k not in free and v != DEFAULTS[k]}
        identity["limits"] = {task: self.limit_for(task) for task in self.tasks}
        if any(grid.prompt_style for grid in self.grids):
            identity["prompt_styles"] = {task: self.prompt_style_for(task) for task in self.tasks}
        cells = sorted(self.cells(), key=lambda c: (c.task, c.method.label, order(c.budget or 0), c.interval or 0))
        identity["cells"] = [
            [c.task, c.method.label, _plain(c.budget or 0), *([c.interval] if c.interval else [])] for c in cells
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def run_name(self) -> str:
        """Return the run's default name, which consists of its model's name and 8 digits of its hash."""
        model = re.sub(r"[^A-Za-z0-9._-]", "-", Path(self.model).name)[:80].strip(".-") or "model"
        return f"{model}-{self.hash()[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary of JSON types. Each method's options are a dictionary, too."""
        grids = [
            {
                "methods": [{"name": m.name, "options": dict(m.options)} for m in grid.methods],
                "budgets": [_plain(size) for size in grid.budgets],
                "tasks": list(grid.tasks),
                "limit": grid.limit,
                **({"intervals": list(grid.intervals)} if grid.intervals else {}),
                **({"prompt_style": grid.prompt_style} if grid.prompt_style else {}),
            }
            for grid in self.grids
        ]
        settings = {name: getattr(self, name) for name in PARSERS}
        return {"grids": grids} | {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}

    def stored(self) -> dict[str, Any]:
        """Return the settings that run.json stores; a command that continues the run must have equal settings, except
        for those in `manifest.HOST`. Settings in `OPERATIONAL` are None in the result: they may differ, and the run's
        record states them elsewhere."""
        return self.to_dict() | dict.fromkeys(OPERATIONAL)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """Make a configuration from the data that `to_dict` returned. Raises UserError for unknown keys and invalid
        values."""
        for name in data:
            if name != "grids" and name not in PARSERS:
                raise UserError(unknown_key(name, PARSERS))
        grids = tuple(
            Grid(
                methods=tuple(MethodChoice(name=m["name"], options=tuple(m["options"].items())) for m in g["methods"]),
                budgets=tuple(parse("'budget'", budget, size) for size in g["budgets"]),
                tasks=tuple(g["tasks"]),
                intervals=tuple(g.get("intervals") or ()),
                limit=g.get("limit"),
                prompt_style=g.get("prompt_style"),
            )
            for g in data["grids"]
        )
        return cls(grids=grids, **{name: data[name] for name in PARSERS if data.get(name) is not None})


def _plain(size: Budget) -> int | str:
    """Return a budget for JSON. A share becomes text (``100%``), because JSON readers do not distinguish 1.0 from 1."""
    return size if isinstance(size, int) else label(size)
