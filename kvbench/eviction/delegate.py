"""For methods that wrap another method: they change its decisions, and take everything else from it unchanged."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.eviction.options import OptionError
from kvbench.eviction.protection import parse_protection

# What the engine asks of a method beside its scores and quotas.
DECLARATIONS = (
    *("needs", "columns", "states", "protect", "trigger", "allowed", "observe", "on_tokens"),
    *("probes", "drafts", "weights", "min_budget", "notes"),
)
PROPERTIES = ("reads_tokens", "per_query_head", "stacked", "decode_bounded")


def delegate(cls: type, functions: tuple[str, ...], properties: tuple[str, ...]) -> None:
    """Define functions and properties in a class whose objects wrap a method, `self.inner`.

    Each of them returns what the function or property of the same name of `inner` returns, with two exceptions.
    "protect": the protection of `inner` applies, or the one that the option `protection` of `inner` names, unless the
    wrapping method's own option `protection` names one. "min_budget": the larger one of the two methods' applies.
    """
    for name in functions:
        setattr(cls, name, _of_inner({"protect": "keeps_always"}.get(name, name)))
    if "protect" in functions:  # as far as the class's own option does not replace it again
        cls.replaced = property(lambda self: parse_protection(self.protection) or self.inner.replaced)  # type: ignore
        cls.unscored = _of_inner("unscored")  # type: ignore[attr-defined]
    if "min_budget" in functions:
        cls.min_budget = lambda self: max(super(cls, self).min_budget(), self.inner.min_budget())  # type: ignore
    for name in properties:
        setattr(cls, name, property(attrgetter(f"inner.{name}")))


def named(option: str, label: str, make: Callable[[], Method]) -> Method:
    """Return the method that `make` makes from the value `label` of an option, for a method that wraps it.

    Raises OptionError if it is no method, or combines two methods: a wrapper asks one method for its scores.
    """
    try:
        inner = make()
    except UserError as error:
        raise OptionError(option, f"is no method: {error}") from None
    if inner.during("prefill") is not inner:
        raise OptionError(option, f"must name a method that does not combine two methods; got {quote(label)}.")
    return inner


def check_base(method: Any, *refusals: tuple[Callable[[Method], bool], str]) -> None:
    """Raise OptionError if the option `base` of a method names an unknown method, or a method that `refusals` exclude.

    refusals: pairs of a condition, which is true for a method that `base` must not name, and words for the kind of
    method that the user should name instead.
    """
    inner = named("base", method.base, lambda: method.inner)
    even = (lambda inner: not (inner.ragged or method.uniform), "a method that scores heads of uneven lengths")
    for refused, wanted in (*refusals, even):
        if refused(inner):
            raise OptionError("base", f"must name {wanted}; got {quote(method.base)}.")


def _of_inner(name: str) -> Any:
    return lambda self, *given: getattr(self.inner, name)(*given)
