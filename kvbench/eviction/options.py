"""Method options: a method declares them, ``--method-opt NAME=VALUE`` sets them, ``kvbench list`` describes them.

An option is a field of the method's dataclass; its type comes from the annotation: int, float, bool, str or Literal,
or a union of one of these and None. `option` adds a help text and a range, which is checked whenever a method is made,
from the command line or from Python. The numbers and switches in a run's settings are parsed by the same functions.
This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union

from kvbench.errors import UserError, quote
from kvbench.eviction.budget import Budget, entries
from kvbench.registry import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from kvbench.eviction.api import Method

M = TypeVar("M", bound="Method")

SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
DIGITS = 18  # most digits of an integer option


class OptionError(UserError):
    """An invalid value of the option `name`. The message is the word "option", the name and `reason`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"option {quote(name)} {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One line of ``kvbench list methods``: an option's name, type in words, default and help."""

    name: str
    type: str
    default: str
    help: str


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    odd: bool = False,
) -> Any:
    """Return a dataclass field with a help text and a range: `low` and `high` are inclusive, `above` is exclusive. odd:
    whether the value must be odd."""
    limits = {"low": low, "high": high, "above": above, "odd": odd}
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits})


def check_values(options: DataclassInstance) -> None:
    """Raise OptionError if a number among the fields is not finite or not within its range."""
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        limits = f.metadata.get("limits", {})
        if not math.isfinite(value) or not _within(value, **limits):
            raise OptionError(f.name, f"must be {_range(**limits)}; got {value}.")


def split_option(text: str) -> tuple[str | None, str, str]:
    """Split ``[METHOD.]NAME=VALUE`` into (method or None, name, value). Raises UserError for a text of another form."""
    name, equals, value = text.partition("=")
    method, dot, option_name = (part.strip() for part in name.rpartition("."))
    if not equals or not option_name or (dot and not method):
        raise UserError(f"--method-opt takes NAME=VALUE; got {quote(text)}.")
    return (method if dot else None), option_name.replace("-", "_"), value.strip()


def parse_options(method_name: str, cls: type[M], pairs: Sequence[tuple[str, str]]) -> M:
    """Make a method of class `cls` from options as text. Raises UserError naming method and option."""
    hints = _types(cls)
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in hints:
            known = did_you_mean(name, list(hints)) or _known([info.name for info in describe(cls)])
            raise UserError(f"method {quote(method_name)} has no option {quote(name)}.{known}")
        if name in values:
            raise UserError(f"option {quote(name)} of method {quote(method_name)} is given twice.")
        try:
            values[name] = parse_value(text, hints[name])
        except ValueError:
            wanted = f"option {quote(name)} of method {quote(method_name)} takes {_wanted(text, hints[name])}"
            raise UserError(f"{wanted}; got {quote(text)}.") from None
    try:
        return cls(**values)
    except OptionError as error:
        raise UserError(f"option {quote(error.name)} of method {quote(method_name)} {error.reason}") from None


def describe(cls: type[Method]) -> list[OptionInfo]:
    """Return a method class's own options, without those that every method has, in the order of their declaration."""
    hints = _types(cls)
    return [
        OptionInfo(f.name, _words(hints[f.name]), _plain(f.default), f.metadata.get("help", ""))
        for f in dataclasses.fields(cls)
        if not f.kw_only
    ]


def check_budget(
    method_name: str, method: Method, budget: Budget | None, *, group: int = 1, word: str = "--budget"
) -> None:
    """Raise UserError if a budget is missing or too small, or is given to a method that takes none.

    A share of the prompt is never too small, because `budget_in_force` increases it to the smallest budget. group:
    query heads per KV head; word: the budget's name in the message.
    """
    if not method.takes_budget:
        if budget is not None:
            why = "with these options" if method.evicts else "evicts nothing and"
            raise UserError(f"method {quote(method_name)} {why} takes no {word}.")
        return
    if budget is None:
        example = f"{word} 512" if word.startswith("-") else f"{word}=512"
        raise UserError(f"method {quote(method_name)} needs {word}. Example: {example}.")
    minimum = method.min_budget()
    copies = group if method.per_query_head else 1
    if isinstance(budget, float) or budget >= minimum * copies:
        return
    if budget >= minimum:
        raise UserError(
            f"method {quote(method_name)} shares the budget of a KV head among the caches of its query heads, so "
            f"{word} must be at least {minimum * copies} ({minimum} in each of {copies} query heads); got {budget}."
        )
    protect = method.keeps_always(minimum)
    recent = "window" if method.needs().queries == "window" else "recent"
    kept = " + ".join(f"{n} {what}" for n, what in ((protect.sinks, "sink"), (protect.recent, recent)) if n)
    tokens = "token" if protect.sinks + protect.recent == 1 else "tokens"
    always = f"keeps {kept} {tokens} at all times, so" if kept else "keeps at least one entry, so"
    if minimum > protect.sinks + protect.recent + 1:
        always = f"needs room for {minimum} entries, so"
    raise UserError(f"method {quote(method_name)} {always} {word} must be at least {minimum * copies}; got {budget}.")


def budget_in_force(method: Method, budget: Budget, prompt_tokens: int, group: int) -> int:
    """Return the budget that applies to one prompt, in entries per KV head.

    A budget in entries is returned unchanged. A share of the prompt is converted to entries, and raised to the method's
    smallest budget if it is below. If the method keeps entries per query head, each of the `group` query heads of a KV
    head needs the smallest budget, and the result is rounded down to a multiple of `group`, so that they split it
    equally.
    """
    if not isinstance(budget, float):
        return budget
    copies = group if method.per_query_head else 1
    return max(entries(budget, prompt_tokens), method.min_budget() * copies) // copies * copies


def _types(cls: type[Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _known(names: Sequence[str]) -> str:
    return f" Known: {', '.join(names)}." if names else " It has none."


def parse_value(text: str, kind: Any) -> Any:
    """Parse a text as a value of the annotated type. Raises ValueError for an invalid text."""
    inner, optional = _strip_none(kind)
    if optional and text.lower() == "none":
        return None
    if typing.get_origin(inner) is Literal:
        value = {str(choice): choice for choice in typing.get_args(inner)}.get(text)
    elif inner is bool:
        value = SWITCH.get(text.lower())
    elif inner is int:
        value = as_whole(text)
    else:
        value = as_number(text) if inner is float else inner(text)
    if value is None or (inner is int and abs(value) >= 10**DIGITS):
        raise ValueError(text)
    return value


def as_whole(raw: object) -> int | None:
    """Return `raw` as an integer if it is an integer, or a text of digits with or without a sign; otherwise None. The
    values 1.5, 2.0, "1e3" and true give None."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    text = raw.strip() if isinstance(raw, str) else ""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,400}", text) else None


def as_number(raw: object) -> float | None:
    """Return `raw` as a float if it is a number, or a text that states a number; otherwise None. The built-in `float`
    alone would also accept true and the texts "nan", "1_0" and non-ASCII digits."""
    if isinstance(raw, float):
        return raw
    text = "" if isinstance(raw, bool) else str(raw).strip()
    return float(text) if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text) else None


def _strip_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was removed: `int | None` gives (int, True)."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        rest = [a for a in typing.get_args(kind) if a is not type(None)]
        return rest[0], True
    return kind, False


def _words(kind: Any) -> str:
    inner, optional = _strip_none(kind)
    if typing.get_origin(inner) is Literal:
        names = [quote(v) for v in typing.get_args(inner)]
        words = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false"}.get(inner, "a text")
    return f"{words} or 'none'" if optional else words


def _wanted(text: str, kind: Any) -> str:
    """Return in words what `parse_value` takes in place of `text`, which it refuses."""
    too_large = _strip_none(kind)[0] is int and re.fullmatch(r"[+-]?[0-9]+", text.strip())
    return f"a whole number of at most {DIGITS} digits" if too_large else _words(kind)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)


def _within(
    value: float, low: float | None = None, high: float | None = None, above: float | None = None, odd: bool = False
) -> bool:
    fits = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    return fits and (not odd or value % 2 == 1)


def _range(low: float | None = None, high: float | None = None, above: float | None = None, odd: bool = False) -> str:
    number = "an odd number" if odd else "a finite number" if low is high is above is None else ""
    lower = f"above {above}" if above is not None else f"{low} or more" if low is not None else ""
    if low is not None and high is not None:
        bounds = f"from {low} to {high}"
    else:
        bounds = " and ".join(b for b in (lower, f"at most {high}" if high is not None else "") if b)
    return ", ".join(part for part in (number, bounds) if part)
