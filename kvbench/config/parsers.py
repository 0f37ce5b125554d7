"""Parsers of single settings. A parser turns a text or TOML value into a typed value, or raises an error.

The same parser serves a flag, an environment variable and a key of a file. The error's message begins with a label,
which says where the user gave the value: ``--seed`` in ``--seed must be a whole number from 0 to 9; got 12.``
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.eviction.budget import Budget, label
from kvbench.eviction.options import SWITCH, as_number, as_whole
from kvbench.eviction.protection import OWN, TERMS, parse_protection
from kvbench.registry import did_you_mean

Parser = Callable[[object], Any]

_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.", re.ASCII | re.DOTALL)


LARGEST = 2**31 - 1  # of settings without a bound of their own: columns of rows hold 32 bits


class BadValue(ValueError):
    """The error for an invalid value of a setting. need: the valid values, in words. got: the invalid value. predicate:
    replaces "must be NEED; got GOT." after the label. `sentence` makes the message; its parameter `label` says where
    the user gave the value."""

    def __init__(self, need: str = "", got: str = "", *, predicate: str = "") -> None:
        super().__init__(predicate or need)
        self.need, self.got, self.predicate = need, got, predicate

    def sentence(self, label: str) -> str:
        if self.predicate:
            return f"{label} {self.predicate}"
        if label.startswith("environment variable"):
            return f"{label}: {self.got} is not {self.need}."
        return f"{label} must be {self.need}; got {self.got}."


def parse(label: str, parser: Parser, raw: object) -> Any:
    """Run a parser on a value. Raises UserError for an invalid value; its message starts with `label`."""
    try:
        return parser(raw)
    except BadValue as error:
        raise UserError(error.sentence(label)) from None


def setting(default: Any, parser: Parser, help: str, *, panel: str, metavar: str = "N") -> Any:
    """Declare a setting: return a dataclass field with its default, parser and help text. panel: the title of the group
    in which ``--help`` lists the setting. metavar: the placeholder of its value in ``--help``."""
    return field(default=default, metadata={"parser": parser, "help": help, "panel": panel, "metavar": metavar})


def got(raw: object) -> str:
    """Return an invalid value of a setting in the form that messages show. Short decimal numbers stay unchanged; all
    other values are quoted and escaped."""
    text = str(raw)
    return text if not isinstance(raw, bool) and len(text) <= 60 and _DECIMAL.fullmatch(text) else quote(raw)


def whole(low: int, high: int | None = None, *, word: str | None = None) -> Parser:
    """Return a parser of integers from `low` to `high` (None: `LARGEST`). word: a text, such as "auto", that the
    parser also accepts."""
    need = f"a whole number from {low} to {high}" if high is not None else f"{low} or more"
    most = LARGEST if high is None else high
    if word:
        need += f", or '{word}'"

    def parser(raw: object) -> int | str:
        if word and raw == word:
            return word
        value = as_whole(raw)
        if value is None:
            raise BadValue(need if need.startswith("a whole") else f"a whole number, {need}", got(raw))
        if value > most and high is None:
            raise BadValue(f"{most} or less", got(raw))
        if value < low or value > most:
            raise BadValue(need, got(raw))
        return value

    return parser


def number(need: str, fits: Callable[[float], bool]) -> Parser:
    """Return a parser of finite floats for which `fits` is true. need: describes these numbers in errors."""

    def parser(raw: object) -> float:
        value = as_number(raw)
        if value is None or not math.isfinite(value) or not fits(value):
            raise BadValue(need, got(raw))
        return value

    return parser


def choice(*names: str) -> Parser:
    def parser(raw: object) -> str:
        if raw not in names:
            raise BadValue(predicate=f"{quote(raw)}: choose {', '.join(names)}.")
        return str(raw)

    return parser


def text(raw: object) -> str:
    """Parse a text that is not blank. Blanks at its ends are removed."""
    if not isinstance(raw, str):
        raise BadValue("a text", quote(raw))
    if not raw.strip():
        raise BadValue(predicate="is empty.")
    if "\0" in raw:
        raise BadValue(predicate=f"has a control character (U+0000) at position {raw.index(chr(0))}; remove it.")
    return raw.strip()


def files(raw: object) -> tuple[str, ...]:
    """Parse one path or a list of paths into a tuple of paths."""
    return tuple(text(path) for path in (raw if isinstance(raw, (list, tuple)) else [raw]))


def strings(raw: object) -> tuple[str, ...]:
    """Parse one string or a list of strings into a tuple. The strings keep their blanks and line ends."""
    texts = tuple(raw) if isinstance(raw, (list, tuple)) else (raw,)
    for string in texts:
        if not isinstance(string, str) or not string:
            raise BadValue("a text of one character or more", quote(string))
    return texts


def assignments(raw: object) -> tuple[str, ...]:
    """Parse one text NAME=VALUE, or a list of them, into a tuple. No name may come twice."""
    texts = strings(raw)
    for text in texts:
        if not _ASSIGNMENT.match(text):
            raise BadValue("NAME=VALUE", quote(text))
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise BadValue(predicate=f"gives {quote(name)} twice. Give it once.")
    return texts


def flag(raw: object) -> bool:
    """Parse a switch: true or false, 1 or 0, yes or no, on or off. Upper case is accepted too."""
    value = SWITCH.get(str(raw).strip().lower())
    if value is None:
        raise BadValue("true or false", quote(raw))
    return value


def protection(raw: object) -> str:
    """Parse a protection, such as "prompt+recent=64" (`kvbench.eviction.protection`), and return it in its canonical
    spelling."""
    try:
        replaced = parse_protection(str(raw))
    except ValueError:
        raise BadValue(TERMS, got(raw)) from None
    return OWN if replaced is None else str(replaced)


def budget(raw: object, entry: int | None = None) -> Budget:
    """Parse a budget: entries per layer and KV head (512), or a share of the prompt ("25%" becomes 0.25).

    entry: the number of the budget in a list, counted from 1, for messages such as "item 3 ('abc') is not a number";
    None: the budget is not in a list.
    """
    value = as_whole(raw)
    literal = str(raw).strip()
    if value is None:
        if literal.endswith("%"):
            return _share(literal)
        number_like = as_number(literal)
        if number_like is None and entry is not None:
            raise BadValue(predicate=f"item {entry} ({quote(raw)}) is not a number.")
        hint = ""
        if number_like is not None and "e" in literal.lower() and number_like >= 1 and number_like.is_integer():
            hint = f" Did you mean {int(number_like)}?"
        elif number_like is not None and 0 < number_like < 1:
            hint = f" Did you mean {label(number_like)}?"
        raise BadValue(predicate=f"{_TAKES}; got {quote(literal)}.{hint}")
    if value == 0:
        raise BadValue(predicate="must be at least 1 token per KV head; use --method full for no eviction.")
    if value < 0:
        raise BadValue("a positive number of tokens per KV head", got(literal))
    return value


_TAKES = "takes whole tokens per KV head (512) or a share of the prompt (25%)"


def _share(literal: str) -> float:
    share = as_number(literal[:-1])
    if share is None:
        raise BadValue(predicate=f"{_TAKES}; got {quote(literal)}.")
    if share <= 0:
        raise BadValue(predicate=f"{literal} keeps nothing; give whole tokens per KV head (512) or a larger share.")
    if share > 100:
        raise BadValue(predicate=f"{literal} is above 100%; use --method full to keep everything.")
    return (
        float(f"{share:.10g}") / 100
    )  # rounded to the digits that `label` shows, so that parsing a label gives the same number


def split(label: str, raw: object, hint: str) -> list[Any]:
    """Return the items of a list that the user gave as a TOML list or as a text with commas. Repeated items stay.

    label: where the user gave the list. Raises UserError for an empty item, and for an empty text; `hint` is the last
    sentence of the message on an empty text.
    """
    members: list[Any] = []
    for item in raw if isinstance(raw, Iterable) and not isinstance(raw, (str, dict)) else [raw]:
        if not isinstance(item, str):
            members.append(item)
            continue
        parts = [part.strip() for part in item.split(",")]
        if parts == [""]:
            raise UserError(f"{label} is empty. {hint}")
        if "" in parts:
            place = parts.index("") + 1
            raise UserError(f"{label} has an empty item at position {place} in {quote(item)}. Remove a comma.")
        members += parts
    return members


def unknown_key(name: str, known: Iterable[str]) -> str:
    return f"unknown key {quote(name)}.{did_you_mean(name, list(known))}"
