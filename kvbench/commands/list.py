"""``kvbench list methods|tasks|models [NAME]``: what there is, and the options of one. Imports no torch."""

from __future__ import annotations

import inspect
import sys
from typing import Annotated, Any

import typer

from kvbench import registry, terminal
from kvbench.errors import UserError, show
from kvbench.eviction.options import describe as describe_options
from kvbench.models import TINY
from kvbench.models import describe as describe_model
from kvbench.registry import did_you_mean
from kvbench.task import get_task, task_names

EPILOG = """Examples:
  kvbench list methods
  kvbench list methods gkv
  kvbench list tasks --json
"""
KINDS = ("methods", "tasks", "models")


def list_(
    kind: Annotated[str, typer.Argument(metavar="methods|tasks|models", help="What to list.", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One of them, in full.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", metavar="")] = False,
) -> None:
    """List methods, tasks or models; with a name, that one with its options and defaults."""
    if kind not in KINDS:
        raise UserError(f"cannot list {show(kind)}.{did_you_mean(kind, KINDS)} There are {', '.join(KINDS)}.")
    rows, one = {"methods": (_methods, _method), "tasks": (_tasks, _task), "models": (_models, _model)}[kind]
    if name is not None:
        entry = one(name)
        if json:
            terminal.data(entry)
        else:
            _print_one(entry)
        return
    entries = rows()
    if json:
        terminal.data(entries)
        return
    shown = [key for key in entries[0] if key != "aliases"]
    table = terminal.grid(*shown)
    for entry in entries:
        table.add_row(*(_cell(entry[key]) for key in shown))
    terminal.console().print(table)


def _methods() -> list[dict[str, Any]]:
    found = []
    for name, cls in registry.methods.items():
        method: Any = cls()
        found.append(
            {
                "name": name,
                "evicts": ("decoding" if method.decode_bounded else "prompt") if method.evicts else "never",
                "per": method.scope if method.evicts else None,
                "min budget": method.min_budget() if method.evicts else None,
                "aliases": registry.methods.aliases(name),
                "paper": method.paper or None,
            }
        )
    return found


def _method(name: str) -> dict[str, Any]:
    canonical = registry.methods.canonical(name)
    cls: Any = registry.methods.get(canonical)
    entry = next(entry for entry in _methods() if entry["name"] == canonical)
    options = [
        {"option": f"{info.name}={info.default}", "type": info.type, "help": info.help}
        for info in describe_options(cls)
    ]
    about = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    return entry | {"paper": cls.paper, "version": cls.version, "about": about, "options": options}


def _tasks() -> list[dict[str, Any]]:
    found = []
    for name in task_names():
        cls: Any = registry.tasks.get(name.split("/")[0])
        questions = cls.manifest.rows if cls.manifest else None
        found.append({"name": name, "suite": cls.suite, "questions": questions, "summary": cls.summary})
    return found


def _task(name: str) -> dict[str, Any]:
    task = get_task(name)
    spec = task.gen("")
    return {
        "name": task.name,
        "suite": task.suite,
        "version": task.version,
        "questions": task.size(),
        "summary": task.summary,
        "headline": task.headline,
        "samples": spec.n,
        "max_new_tokens": spec.max_new_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "prompt styles": list(task.prompt_styles),
        "variants": list(task.variants),
        "data": task.manifest.hub if task.manifest else "generated",
    }


def _models() -> list[dict[str, Any]]:
    info = describe_model(TINY)
    about = "built in; for demos, CI and learning. Any folder or hub name of a transformers model works too."
    return [{"name": TINY, "type": info.model_type, "context": info.context, "about": about}]


def _model(name: str) -> dict[str, Any]:
    info = describe_model(name)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    shape = {key: info.config.get(key) for key in keys}
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
        console.print(f"\n{key} (--method-opt NAME=VALUE)\n")
        table = terminal.grid(*value[0])
        for item in value:
            table.add_row(*(_cell(cell) for cell in item.values()))
        console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
