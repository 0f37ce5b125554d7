"""The settings of ``kvbench train``: defaults, preset and ``--opt``; and the command line that repeats a training."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.parsers import BadValue
from kvbench.errors import UserError, quote
from kvbench.eviction.options import parse_value
from kvbench.registry import did_you_mean
from kvbench.train.catalogue import TABLES, entry_of
from kvbench.train.data_place import short_name
from kvbench.train.entry import FLAGS, OPTIMISER, check_optimiser
from kvbench.train.prompting import Prompting

if TYPE_CHECKING:
    from kvbench.train.recipe import Settings


def settings_of(kind: str, model: str, preset: str | None, given: list[str]) -> dict[str, Any]:
    """Return the value of every setting of a recipe. --opt overrides the preset, which overrides the recipe's default.

    kind: the name of a recipe, or of a table, which has no settings and no preset. given: the texts of --opt, each
    NAME=VALUE. The result also has the name of the preset, under "preset". Raises UserError for an unknown setting or
    an invalid value.
    """
    entry = None if kind in TABLES else entry_of(kind)
    known = entry.settings(model, preset) if entry else {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--opt takes NAME=VALUE; got {quote(text)}.")
        names = [name for name in known if name not in FLAGS]
        if name not in names:
            listed = ", ".join(names) or "none"
            raise UserError(f"{kind} has no setting {quote(name)}.{did_you_mean(name, names)} It has {listed}.")
        known[name] = _parse_like(known[name], name, value)
    if entry:
        check_optimiser(known)
    return known | {"preset": entry and entry.preset_for(model, preset)}


def _parse_like(default: Any, name: str, text: str) -> Any:
    """Parse the value of --opt as the type of the setting's default. Raises UserError."""
    kind = type(default)
    try:
        value = parse_value(text, kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(text)
    except ValueError:
        need = {int: "a whole number", float: "a finite number", bool: "true or false"}.get(kind, "text")
        raise UserError(BadValue(need, quote(text)).sentence(f"--opt {name}")) from None
    return value


def command_line(kind: str, typed: Mapping[str, Any], prompting: Prompting, settings: Settings) -> str:
    """Return the command line that repeats a training, for the card of the weights.

    The command line names data, plug-ins and the folder of --continue-from without their parent folders, because the
    card must not show where they lie on this machine. The model is named as the user typed it. kind: the name of the
    recipe. typed: the values of the command's options, by name.
    """
    more, data, before = settings.more, typed["data"], typed["continue_from"]
    flags = {"model": typed["model"], "preset": more["preset"], "data": data and short_name(data)}
    flags |= prompting.settings()
    flags["continue_from"] = before and Path(before).name
    thinking = {None: "", True: " --thinking", False: " --no-thinking"}[flags.pop("thinking", None)]
    flags |= {"samples": more["samples"], "steps": settings.steps, "lr": repr(settings.lr), "batch": settings.batch}
    flags |= {"seed": settings.seed}
    code = [("plugin", Path(path).name) for path in typed["plugin"] or ()]
    given = [(name, value) for name, value in (*code, *flags.items()) if value is not None]
    words = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given)
    values = {name: getattr(settings, name) for name in OPTIMISER}
    values |= {name: more[name] for name in entry_of(kind).defaults() if name in more and name not in FLAGS}
    own = "".join(" --opt " + shlex.quote(f"{name}={value}") for name, value in values.items())
    return f"kvbench train {kind} {words}{thinking}{own} --out DIR"
