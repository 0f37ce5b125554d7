"""Helps to write a wrapper, a method that changes the decisions of another method and takes all else from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.eviction.choose import from_label
from kvbench.eviction.options import OptionError
from kvbench.eviction.protection import OWN, parse_protection

# What the engine reads from a method beside its scores, quotas, protection and smallest budget.
DECLARATIONS = (
    *("needs", "columns", "states", "trigger", "allowed", "observe", "on_tokens", "reads_tokens"),
    *("probes", "drafts", "weights", "notes", "per_query_head", "stacked", "decode_bounded", "ragged", "needs_aligned"),
)


class Wrapper(Method):
    """Base of wrappers. Subclasses define the option `base`, and call `delegate`."""

    base: str

    @cached_property
    def inner(self) -> Method:
        """The method that the option `base` names; it computes the scores."""
        return wrapped(self.base, self.protection)


def wrapped(label: str, protection: str) -> Method:
    """Return the method that a label names, for a wrapper with this option `protection`. Unless the option is `own`,
    the method gets it too, because some methods read their protection while they score."""
    method = from_label(label)
    return method if protection == OWN else replace(method, protection=protection)


def delegate(cls: Any, *more: str) -> None:
    """Let a class take the `DECLARATIONS` and `more` from the method that its objects wrap, `self.inner`.

    What the class itself defines stays, except `stacked`, `protect`, `unscored` and `replaced`. The protection in force
    is the one in the wrapper's option `protection`, else the one in the option of `inner`, else the one that `inner`
    declares. Unless the class itself defines `min_budget`, the smallest budget is the larger of the inherited value and
    that of `inner`.
    """
    own = vars(cls).keys() - {"stacked"}  # `Method` sets `stacked` in every class that defines `score`
    for name in (*DECLARATIONS, *more):
        if name in own or (name == "reads_tokens" and "on_tokens" in own):
            continue
        function = callable(getattr(Method, name))
        setattr(cls, name, _of_inner(name) if function else property(attrgetter(f"inner.{name}")))
    cls.protect, cls.unscored = _of_inner("keeps_always"), _of_inner("unscored")
    cls.replaced = property(lambda self: parse_protection(self.protection) or self.inner.replaced)
    if "min_budget" not in own:
        cls.min_budget = lambda self: max(super(cls, self).min_budget(), self.inner.min_budget())


def named(option: str, label: str, make: Callable[[], Method]) -> Method:
    """Make the method that an option of a wrapper names. label: the option's value; make: makes the method. Raises
    OptionError if `label` names no method, two combined methods (a wrapper can wrap only one), or an oracle, whose
    tables of future attention `kvbench replay` makes only for the oracle itself."""
    try:
        inner = make()
    except UserError as error:
        raise OptionError(option, f"must name a method: {error}") from None
    if inner.during("prefill") is not inner:
        wanted = "must name one method, not two combined methods such as snapkv+gkv or scope"
        raise OptionError(option, f"{wanted}; got {quote(label)}.")
    if inner.oracle:
        raise OptionError(option, f"must name a method that does not read the future; got {quote(label)}.")
    return inner


def check_base(method: Any, *refusals: tuple[Callable[[Method], bool], str]) -> None:
    """Raise OptionError if the option `base` of the wrapper `method` names a method that it cannot wrap.

    No wrapper can wrap an unknown method, two combined methods or an oracle. A wrapper that is not `uniform` needs a
    method that can score heads of uneven lengths. A wrapper whose heads may keep different tokens cannot wrap a method
    that needs the same tokens in all heads (`needs_aligned`).

    refusals: more methods that the wrapper cannot wrap, as pairs. The first part of a pair is a condition that is true
    for such a method. The second part is words for the kind of method that the user should name instead.
    """
    inner = named("base", method.base, lambda: method.inner)
    even = (lambda inner: not (inner.ragged or method.uniform), "a method that can score heads of uneven lengths")
    own = (lambda inner: inner.needs_aligned and not method.aligned, "a method that does not average over heads")
    for refused, wanted in (*refusals, even, own):
        if refused(inner):
            raise OptionError("base", f"must name {wanted}; got {quote(method.base)}.")


def _of_inner(name: str) -> Any:
    return lambda self, *given: getattr(self.inner, name)(*given)
