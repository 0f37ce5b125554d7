"""Methods that change what another method decides, and take all else from that method."""

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
    """Let a class take these functions and properties from the method in its attribute `inner`.

    The class protects what is protected in `inner`, also where an option of `inner` replaces its protection; and its
    budget has room for the class's own protection and for all that `inner` needs.
    """
    for name in functions:
        setattr(cls, name, _of_inner({"protect": "keeps_always"}.get(name, name)))
    if "min_budget" in functions:
        cls.min_budget = lambda self: max(super(cls, self).min_budget(), self.inner.min_budget())  # type: ignore
    for name in properties:
        setattr(cls, name, property(attrgetter(f"inner.{name}")))


def _of_inner(name: str) -> Any:
    return lambda self, *given: getattr(self.inner, name)(*given)
