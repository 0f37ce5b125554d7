"""Find or make the method class of a name ``kvpress:NAME``, from kvpress's press NAME."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.integrations.kvpress.facts import PRESSES, REFUSED
from kvbench.integrations.kvpress.load import kvpress
from kvbench.integrations.kvpress.method import LayeredPressMethod, PressMethod
from kvbench.integrations.kvpress.options import buffer_field, fields_of, takes_press
from kvbench.registry import near


def canonical(name: str) -> str:
    """Return a press's name as kvpress spells it; case does not matter.

    Raises UserError for an unknown press, or for one that cannot run, and SetupError as `load.kvpress` does.
    """
    plain = name.strip().lower()
    spelled = {press.lower(): press for press in (*PRESSES, *REFUSED)}
    if plain not in spelled:
        meant = [f"kvpress:{spelled[press]}" for press in near(plain, [press.lower() for press in PRESSES])]
        hint = f"Did you mean {' or '.join(meant)}?" if meant else f"Known: {', '.join(PRESSES)}."
        raise UserError(f"kvpress has no scorer press {quote(name)}. {hint}")
    press = spelled[plain]
    if press in REFUSED:
        raise UserError(f"method 'kvpress:{press}' cannot run: {REFUSED[press]}.")
    kvpress()
    return press


@functools.cache
def member(name: str) -> type[PressMethod]:
    """Return the method class made from a press. name: the press's name as `canonical` returns it."""
    press, facts = getattr(kvpress(), name), PRESSES[name]
    fields = fields_of(press)
    if facts.hidden == "many" or any(takes_press(press, option) for option, _, _ in fields):
        fields.append(buffer_field())
    base = LayeredPressMethod if hasattr(press, "get_layer_budget") else PressMethod
    about = {"press_class": press, "facts": facts, "__doc__": inspect.cleandoc(press.__doc__ or "")}
    made: Any = dataclasses.make_dataclass(name, fields, bases=(base,), frozen=True, namespace=about)
    made.__module__ = press.__module__  # whose files are part of a row's identity
    return made
