"""Turns the parameters of a press into options of a method, with help texts from the press's docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

from kvbench.eviction.api import option

RATIO = "compression_ratio"  # parameter that kvbench sets before each call, from budget and number of entries
DEFAULT = "SnapKVPress"  # default of a parameter that takes another press
BUFFER = "buffer"
STORED = 256  # default of `buffer`, as in kvpress's DecodingPress

# Options whose ranges kvpress itself does not check. Other options that are whole numbers must be 0 or more.
POSITIVE = ("window_size", "beta", "lag_size", "local_window_size", "chunk_size", "sketch_dimension")
LIMITS: dict[str, dict[str, Any]] = {
    "kernel_size": {"low": 1, "odd": True},
    "first_stage_ratio": {"low": 0, "high": 1},
    "epsilon": {"low": 0},
    "n_future_positions": {"low": 1},
    **{name: {"low": 1} for name in POSITIVE},
}


def fields_of(press: type) -> list[tuple[str, Any, Any]]:
    """Return (name, type, dataclass field) for each parameter of a press that becomes an option."""
    parameters = inspect.signature(press).parameters.values()
    return [_field(press, p) for p in parameters if p.name != RATIO and not p.name.startswith("_")]


def buffer_field() -> tuple[str, Any, Any]:
    """Return (name, type, field) of the option `buffer`: the most hidden states, always of the newest tokens, that a
    press gets while decoding."""
    help = "while decoding, each layer stores the hidden states of this many newest tokens, which the press reads"
    return BUFFER, int, option(STORED, help, low=1)


def takes_press(press: type, name: str) -> bool:
    """Return whether the parameter `name` of a press takes another scorer press."""
    from kvpress import ScorerPress

    kind = inspect.signature(press).parameters[name].annotation
    return isinstance(kind, type) and issubclass(kind, ScorerPress)


def _field(press: type, parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    name = parameter.name
    if takes_press(press, name):
        return name, str, option(DEFAULT, _help(press, name))
    limits = LIMITS.get(name, {"low": 0} if parameter.annotation is int else {})
    return name, parameter.annotation, option(parameter.default, _help(press, name), **limits)


def _help(press: type, name: str) -> str:
    """Return the first sentence of a press's docstring about a parameter, with a small first letter and no full stop.

    Returns "" if the docstring has no sentence about the parameter.
    """
    text = inspect.cleandoc(press.__doc__ or "")
    found = re.search(rf"^{name}\s*:.*\n((?:[ \t]+.*\n?)+)", text, flags=re.MULTILINE)
    sentence = re.split(r"(?<=\.)\s", " ".join(found[1].split()))[0] if found else ""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
