"""``kvbench list KIND [NAME]``: lists methods, tasks, recipes, models, suites or runs, or shows one in full.

It imports no torch.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench import registry
from kvbench.cli import suites
from kvbench.cli.options import Document, Plugins, Text, plain
from kvbench.cli.recipe_rows import recipe_row, recipe_rows
from kvbench.config.plugins import load_plugins
from kvbench.console import terminal
from kvbench.errors import UserError, bare, few, quote
from kvbench.registry import did_you_mean
from kvbench.taskkit.names import LM_EVAL, expand, get_task, task_names

if TYPE_CHECKING:
    from kvbench.task import Task

EPILOG = """Examples:
  kvbench list methods
  kvbench list methods gkv
  kvbench list methods snapkv+gkv
  kvbench list tasks --json
  kvbench list recipes foresightkv
  kvbench list suites
  kvbench list suites gkv-fig4
  kvbench list runs
"""
KINDS = ("methods", "tasks", "recipes", "models", "suites", "runs")
FLAGS = {"options": "--method-opt NAME=VALUE", "settings": "--opt NAME=VALUE, or the flag", "presets": "--preset NAME"}
FEW = 3  # names in one field of the table of runs
OF_LM_EVAL: dict[str, Any] = {
    "name": f"{LM_EVAL}NAME",
    "suite": "lm_eval",
    "questions": None,
    "needs": [],
    "data": "lm-eval",
    "summary": "a task of lm-eval, by the name that lm-eval gives it: 'kvbench lm-eval ls tasks' shows them",
}


def list_(
    kind: Annotated[
        str,
        typer.Argument(metavar="methods|tasks|recipes|models|suites|runs", help="What to list.", show_default=False),
    ],
    name: Annotated[
        Text,
        typer.Argument(
            metavar="[NAME]", help="Show one method, task, recipe, model or suite in full.", show_default=False
        ),
    ] = None,
    plugin: Plugins = None,
    out: Annotated[Text, plain("--out", "With runs: the folder of all runs. Default: results.", "DIR")] = None,
    json: Document = False,
) -> None:
    """List methods, tasks, recipes, models, suites or runs; with a name, show one in full, with its defaults."""
    if kind not in KINDS:
        raise UserError(f"cannot list {quote(kind)}.{did_you_mean(kind, KINDS)} There are {', '.join(KINDS)}.")
    if kind == "runs":
        _list_runs(name, out, json)
        return
    if out is not None:
        raise UserError(f"--out {quote(out)} names the folder of all runs; use it with 'kvbench list runs' only.")
    load_plugins(plugin or [])
    rows, one = {
        "methods": (_methods, _method),
        "tasks": (_tasks, _task),
        "recipes": (recipe_rows, recipe_row),
        "models": (_models, _model),
        "suites": (suites.listed, suites.one),
    }[kind]
    found: Any = rows() if name is None else one(name)
    if json:
        terminal.data(found)
    elif name is not None:
        _print_one(found)
    else:
        _print_table(found)
        for prefix in registry.methods.families if kind == "methods" else ():
            terminal.note(f"{prefix}:NAME are methods too: docs/{prefix}.md lists the names.")


def _print_table(entries: list[dict[str, Any]]) -> None:
    shown = [key for key in entries[0] if key != "aliases"]
    table = terminal.grid(*shown, whole=("name",))
    for entry in entries:
        table.add_row(*(_cell(entry[key]) for key in shown))
    terminal.console().print(table)


def _list_runs(name: str | None, out: str | None, json: bool) -> None:
    """Print the runs of a results folder. Control characters are escaped, because a run may come from a stranger."""
    from kvbench.report.runs import described

    if name is not None:
        raise UserError(f"'kvbench list runs' takes no name; 'kvbench show {bare(name)}' shows one run.")
    folder = Path("results" if out is None else out)
    if not folder.is_dir():
        raise UserError(f"there is no folder {quote(folder)}; --out DIR names the folder of all runs.")
    entries = list(described(folder))
    if json:
        terminal.data(entries)
    elif entries:
        _print_table([_short_run(entry) for entry in entries])
        for entry in entries:
            if entry["note"]:
                terminal.warning(f"run {quote(entry['name'])}: {entry['note']}")
    else:
        terminal.note(f"there are no runs in {quote(folder)}.")


def _short_run(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a run, shortened to one line of the table.

    The field `rows` is the number of rows for a complete run, otherwise a text such as "3 of 8, unfinished". If the
    number of rows is unknown, the field is the status alone.
    """
    lists = {key: few(entry[key], FEW) or None for key in ("methods", "budgets", "tasks")}
    done, status = entry["rows"], entry["status"]
    rows = status if done is None else done.partition(" of ")[0] if status == "complete" else f"{done}, {status}"
    created = entry["created"] and entry["created"].replace("T", " ")[:16]
    shown = {"name": entry["name"], "model": entry["model"], **lists}
    shown |= {"settings": entry["settings"], "rows": rows, "created": created}
    return {key: value and terminal.clean(value) for key, value in shown.items()}


def _methods() -> list[dict[str, Any]]:
    return [_nature(name, cls()) for name, cls in registry.methods.items()]


def _nature(name: str, method: Any) -> dict[str, Any]:
    """Return the properties of a method that ``kvbench list methods`` shows. method: an instance with default
    options."""
    decodes = method.trigger(1).growth is not None
    return {
        "name": name,
        "kind": method.kind if method.evicts else None,
        "phase": ("prompt+decode" if decodes else "prompt") if method.evicts else None,
        "scope": _scope(method) if method.evicts else None,
        "bounded": method.decode_bounded,
        "trained": method.trained,
        "min budget": method.min_budget() if method.takes_budget else None,
        "aliases": [] if "+" in name else registry.methods.aliases(name),
        "paper": method.paper or None,
    }


def _scope(method: Any) -> str:
    """Return a method's scope as text, for example ``head``: the entries of a head compete for the budget. The text is
    ``head, uneven`` if the heads get uneven shares of the budget."""
    return str(method.scope) if method.uniform or method.scope != "head" else "head, uneven"


def _method(name: str) -> dict[str, Any]:
    from kvbench.eviction import choose

    canonical = choose.canonical(name)
    method = choose.make(canonical, {})
    if "+" in canonical:
        return _pair(canonical, method)
    cls = type(method)
    about = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")
    more = {"version": cls.version, "about": about, "options": _options(canonical)}
    return _nature(canonical, method) | more


def _pair(name: str, method: Any) -> dict[str, Any]:
    """Return the properties of a method made of two: in ``snapkv+gkv``, snapkv evicts the prompt, and gkv evicts
    generated tokens, under one budget."""
    first, second = name.split("+")
    parts: list[Any] = [registry.methods.get(part) for part in (first, second)]
    both: dict[str, Any] = {
        "kind": "+".join(dict.fromkeys(str(part.kind) for part in parts)),
        "scope": "+".join(dict.fromkeys(_scope(part) for part in parts)),
        "trained": any(part.trained for part in parts),
        "paper": "; ".join(str(part.paper) for part in parts if part.paper) or None,
        "version": "+".join(str(part.version) for part in parts),
        "about": f"{first} evicts the prompt and {second} the generated entries, under one budget. "
        f"'kvbench list methods {first}' and 'kvbench list methods {second}' describe them.",
        "options": [option for part in (first, second) for option in _options(part, f"{part}.")],
    }
    return _nature(name, method) | both


def _options(name: str, prefix: str = "") -> list[dict[str, Any]]:
    from kvbench.eviction.options import describe

    infos = describe(registry.methods.get(name))
    return [{"option": f"{prefix}{i.name}={i.default}", "type": i.type, "help": i.help} for i in infos]


def _tasks() -> list[dict[str, Any]]:
    rows = []
    for name in task_names():
        base, slash, _ = name.partition("/")
        cls: Any = registry.tasks.get(base)
        if slash and cls.group:  # 'kvbench list tasks GROUP' shows its members
            continue
        members = [] if name == "file" else [get_task(member) for member in expand(name)]  # "file" needs its file
        rows.append(
            {
                "name": name,
                "suite": cls.suite,
                "questions": _questions(members),
                "needs": sorted({need for member in members for need in member.needs}),
                "data": _kinds(members) or "--task-file",
                "summary": f"variant of {base}" if slash else cls.summary,
            }
        )
    return [*rows, OF_LM_EVAL]


def _questions(tasks: list[Task]) -> int | None:
    """Return how many questions several tasks have together. None without tasks, or if the number cannot be known
    before the data are read."""
    sizes = [task.size() for task in tasks]
    return None if None in sizes or not sizes else sum(size or 0 for size in sizes)


def _kinds(tasks: list[Task]) -> str:
    return ", ".join(dict.fromkeys(map(_kind, tasks)))


def _kind(task: Task) -> str:
    """Return the kind of place that a task's data come from: hub, web, bundled, generated or lm-eval. For gated data
    the text ends with "(gated)"."""
    manifest = task.manifest
    if manifest is None:
        return "lm-eval" if task.name.startswith(LM_EVAL) else "generated"
    return ("hub" if manifest.hub else "web" if manifest.url else "bundled") + " (gated)" * manifest.gated


def _task(name: str) -> dict[str, Any]:
    members = expand(name)
    tasks = [get_task(member) for member in members]
    task = tasks[0]
    about = {
        "name": name if len(members) > 1 else task.name,
        "suite": task.suite,
        "version": task.version,
        "questions": _questions(tasks),
        "summary": task.summary,
    }
    lengths = [str(length) for length in task.lengths]
    if len(members) > 1:
        averages = list(task.averages)
        return about | {"members": members, "averages": averages, "lengths": lengths, "data": _kinds(tasks)}
    spec = task.gen("")
    return about | {
        "headline": task.headline,
        "samples": spec.n,
        "max_new_tokens": spec.max_new_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "prompt styles": list(task.prompt_styles),
        "variants": list(task.variants),
        "lengths": lengths,
        "needs": sorted(task.needs),
        "data": _source(task),
    }


def _source(task: Task) -> str:
    """Return the place that a task's data come from: a name on the hub or a web address, and "(gated)" for gated data.
    If a task has neither, return the kind of place (`_kind`)."""
    manifest = task.manifest
    place = manifest and (manifest.hub or manifest.url)
    return f"{place}{' (gated)' if manifest and manifest.gated else ''}" if place else _kind(task)


def _models() -> list[dict[str, Any]]:
    from kvbench.sources.models import TINY, describe

    info = describe(TINY)
    about = "built in; for demos, CI and learning. Any folder or hub name of a transformers model works too."
    return [{"name": TINY, "type": info.model_type, "context": info.context, "about": about}]


def _model(name: str) -> dict[str, Any]:
    from kvbench.sources.models import describe

    info = describe(name)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    shape = {key: info.text.get(key) for key in keys}
    return {
        "name": info.name,
        "type": info.model_type,
        "context": info.context,
        **shape,
        "chat": info.has_chat_template,
    }


def _print_one(entry: dict[str, Any]) -> None:
    console = terminal.console()
    width = max(len(key) for key in entry)
    for key, value in entry.items():
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            lines = _cell(value).splitlines() or [""]
            console.print(f"{key:<{width}}  {lines[0]}", *(" " * (width + 2) + line for line in lines[1:]), sep="\n")
            continue
        console.print(f"\n{key} ({FLAGS[key]})\n")
        terminal.table(tuple(value[0]), ([_cell(cell) for cell in item.values()] for item in value))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
