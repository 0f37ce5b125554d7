"""Makes a method from its name and options.

gkv                                           one method
snapkv+gkv                                    two methods under one budget
snapkv(kernel=5, window=16)                   a method with options, as tables print it
snapkv+gkv(snapkv.window=8, gkv.alpha=0.9)    two methods with options
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.eviction.combined import Combined
from kvbench.eviction.options import parse_options
from kvbench.registry import methods

Pairs = list[tuple[str, Any]]  # options: name, value


def canonical(name: str) -> str:
    """Return the registered spelling of a method's name, or of two names joined by ``+``. A name joined to itself gives
    the single name. Raises UserError for an unknown or malformed name."""
    parts = name.split("+")
    if "(" in name:
        bare, option = name.partition("(")[0].strip(), name.partition("(")[2].partition("=")[0].strip() or "NAME"
        raise UserError(
            f"method {quote(name)}: give the name alone here, and options with --method-opt {bare}.{option}=VALUE."
        )
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise UserError(f"method {quote(name)}: a name is missing beside the '+'; give two names, as in snapkv+gkv.")
    if len(parts) > 2:
        raise UserError(
            f"method {quote(name)}: at most two methods can be combined, one for the prompt and one for the answer."
        )
    spelled = [methods.canonical(part) for part in parts]
    return "+".join(dict.fromkeys(spelled))  # a method combined with itself is that method


def make(name: str, options: Mapping[str, Any]) -> Method:
    """Make a method from its name and option values. For two methods, the option's name has a prefix: ``gkv.alpha``."""
    return _made(name, list(options.items()), lambda part, own: methods.get(part)(**dict(own)))


def parse(name: str, pairs: list[tuple[str, str]]) -> Method:
    """Make a method from its name and options as text. Raises UserError for an unknown method, an invalid option, or
    two methods that cannot be combined."""
    return _made(name, pairs, lambda part, own: parse_options(part, methods.get(part), own))


def _made(name: str, options: Pairs, build: Callable[[str, Pairs], Method]) -> Method:
    """Make one method with all options, or two combined methods, each with the options that have its name as prefix.

    build: makes a method from its name and options. If `name` joins two methods, raises UserError for an option whose
    prefix names neither.
    """
    parts = canonical(name).split("+")
    if len(parts) == 1:
        return build(parts[0], options)
    for option, _ in options:
        if option.partition(".")[0] not in parts:
            wanted = " or ".join(quote(f"{part}.{option}") for part in takers(name, option) or parts)
            raise UserError(f"option {quote(option)} of {quote(name)} names neither method; give {wanted}.")
    own = ([(n.removeprefix(f"{part}."), v) for n, v in options if n.startswith(f"{part}.")] for part in parts)
    return Combined((parts[0], parts[1]), *map(build, parts, own))


def addressed(name: str, option: str, value: str) -> list[tuple[str, str]]:
    """Return the (name, value) pairs, as `parse` takes them, of one ``--method-opt``.

    name: a method, or two joined by ``+``. For one method the pair has the option's bare name. For two methods the pair
    has a prefix, as in ``gkv.alpha``. An option given without a prefix becomes one pair per method that has this
    option; if neither has it, one pair for the second method. Raises UserError if the prefix is not one of the methods.
    """
    parts = name.split("+")
    method, dot, bare = option.rpartition(".")
    if dot:
        method = methods.canonical(method)
        if method not in parts:
            raise UserError(
                f"option {quote(option)} is for method {quote(method)}, which is not in {quote(name)}; leave it out."
            )
        return [(f"{method}.{bare}" if len(parts) > 1 else bare, value)]
    if len(parts) == 1:
        return [(option, value)]
    return [(f"{part}.{option}", value) for part in takers(name, option) or parts[-1:]]  # `parse` then raises


def takers(name: str, option: str) -> list[str]:
    """Return which methods in `name` (one, or two joined by ``+``) have this option."""
    return [part for part in name.split("+") if any(f.name == option for f in fields(methods.get(part)))]


def from_label(label: str) -> Method:
    """Return the method that a table's label names: ``snapkv(kernel=5, window=16)``, ``snapkv+gkv(gkv.alpha=0.5)``.

    With two methods, an option without a prefix applies to each method that has it. Raises UserError for a malformed
    label, an unknown method or an invalid option.
    """
    if any("(" in part for part in _split(label, "+")[:-1]):
        raise UserError(
            f"method {quote(label)}: the options of both methods stand together at the end, each with the name of its "
            "method, as in snapkv+gkv(snapkv.window=8, gkv.alpha=0.9)."
        )
    name, bracket, rest = label.strip().partition("(")
    if bracket and not rest.endswith(")"):
        raise UserError(f"method {quote(label)}: the options must end with ')'.")
    pairs = []
    inside = rest.removesuffix(")").strip()
    for item in (part.strip() for part in _split(inside, ",")) if inside else ():
        option, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"method {quote(label)}: options are NAME=VALUE; got {quote(item)}.")
        pairs.append((option.strip(), value.strip()))
    name = canonical(name.strip())
    return parse(name, [own for option, value in pairs for own in addressed(name, option, value)])


def _split(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def changed(name: str, method: Method) -> tuple[tuple[str, Any], ...]:
    """Return the options of a method that differ from their defaults, sorted by name."""
    default = make(name, {}).options()
    return tuple(sorted((k, v) for k, v in method.options().items() if k not in default or v != default[k]))
