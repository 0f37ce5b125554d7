"""For methods that wrap another method: they change its decisions, and take everything else from it unchanged."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

# What the engine asks of a method beside its scores and quotas.
DECLARATIONS = (
    *("needs", "columns", "states", "protect", "trigger", "allowed", "observe", "on_tokens"),
    *("probes", "drafts", "weights", "min_budget"),
)
PROPERTIES = ("reads_tokens", "per_query_head", "stacked", "decode_bounded")


def delegate(cls: type, functions: tuple[str, ...], properties: tuple[str, ...]) -> None:
    """Give a class these functions and properties; each calls its namesake in the method `self.inner`."""
    for name in functions:
        setattr(cls, name, _of_inner(name))
    for name in properties:
        setattr(cls, name, property(attrgetter(f"inner.{name}")))


def _of_inner(name: str) -> Any:
    return lambda self, *given: getattr(self.inner, name)(*given)
