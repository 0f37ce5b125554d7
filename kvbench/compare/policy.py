"""The rules by which a comparison fails: margins, tiers and limits, from the command line or a file.

    margin = 0.02                      # a drop up to this is accepted
    [[cells]]                          # the first table whose patterns fit a cell decides
    task = "walk*"
    method = "gkv*"
    budget = "48"
    tier = "advisory"                  # critical (default) or advisory: failures are warnings
    margin = 0.05
    [limits]
    kv_bytes_peak = 1.1                # largest ratio NEW / BASE; for tokens_per_second: smallest ratio
    truncated = 0.05                   # largest rise of a share

The file comes from the repository under test: kvbench limits its size and refuses unknown keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvbench.compare.cell import Key
from kvbench.compare.measures import LIMITED
from kvbench.compare.user_file import content
from kvbench.errors import UserError, bare, quote
from kvbench.registry import did_you_mean

TIERS = ("critical", "advisory")
PATTERNS = ("task", "method", "budget", "model")
LARGEST = 1 << 20  # bytes of a policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Settings for the cells that fit all patterns of the rule. An omitted pattern fits every cell."""

    patterns: Mapping[str, str]
    tier: str = TIERS[0]
    margin: float | None = None

    def fits(self, key: Key) -> bool:
        names = {
            "task": key.task,
            "method": key.method,
            "budget": key.size,
            "model": key.model,
        }
        return all(fnmatchcase(names[part], pattern) for part, pattern in self.patterns.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules by which a comparison fails. margin: the accepted drop of the mean score, from 0 to 1. limits: by the
    name of a measure, how far it may change (see the module's docstring)."""

    margin: float = 0.0
    rules: tuple[Rule, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    strict: bool = False  # whether undecided critical cells and unfinished runs of NEW fail the comparison

    def margin_of(self, key: Key) -> float:
        own = self._rule(key).margin
        return self.margin if own is None else own

    def critical(self, key: Key) -> bool:
        return self._rule(key).tier == "critical"

    def unused(self, keys: Sequence[Key]) -> list[int]:
        """Return which [[cells]] tables of the policy fit none of these cells, as numbers from 1."""
        return [number for number, rule in enumerate(self.rules, 1) if not any(map(rule.fits, keys))]

    def _rule(self, key: Key) -> Rule:
        return next((rule for rule in self.rules if rule.fits(key)), Rule(patterns={}))


def read_policy(path: Path) -> Policy:
    """Return the policy of a TOML file. Raises UserError."""
    try:
        document = tomllib.loads(content(path, LARGEST).decode())
        _check_whole(document)
    except (ValueError, RecursionError) as error:
        raise UserError(f"gate file {quote(path)} cannot be read as TOML: {bare(error)}.") from None
    return _policy(document, bare(path))


def _check_whole(value: Any) -> None:
    """Raise ValueError if the value contains a whole number beyond TOML's 64 bits: Python may refuse to print such a
    number in a message."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has more than 64 bits")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_whole(part)


def _policy(document: Mapping[str, Any], where: str) -> Policy:
    _known(document, ("margin", "strict", "cells", "limits"), where)
    cells, limits, strict = document.get("cells", []), document.get("limits", {}), document.get("strict", False)
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise UserError(f"{where}: cells is not a list of tables; write each table as [[cells]].")
    if not isinstance(limits, dict):
        raise UserError(f"{where}: limits is {quote(limits)} and must be a table; write [limits].")
    if not isinstance(strict, bool):
        raise UserError(f"{where}: strict is {quote(strict)}; write true or false.")
    _known(limits, LIMITED, f"{where}: limits")
    return Policy(
        margin=margin(document.get("margin", 0.0), f"{where}: margin"),
        rules=tuple(_rule(cell, f"{where}: cells {number}") for number, cell in enumerate(cells, 1)),
        limits={name: _number(value, f"{where}: {name}", 0.0, 1e6) for name, value in limits.items()},
        strict=strict,
    )


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    _known(table, (*PATTERNS, "tier", "margin"), where)
    patterns = {name: str(table[name]) for name in PATTERNS if name in table}
    if wrong := [name for name in patterns if type(table[name]) not in (str, int)]:
        raise UserError(f'{where}: {wrong[0]} is {quote(table[wrong[0]])}; write a pattern, as in "gkv*".')
    if (tier := table.get("tier", TIERS[0])) not in TIERS:
        raise UserError(f"{where}: tier is {quote(tier)}; choose {' or '.join(TIERS)}.")
    own = margin(table["margin"], f"{where}: margin") if "margin" in table else None
    return Rule(patterns=patterns, tier=tier, margin=own)


def margin(value: Any, where: str) -> float:
    """Return a margin as a number from 0 to 1, where 0.02 is 2 points of the mean score. where: the margin's name in
    the error. Raises UserError."""
    return _number(value, where, 0.0, 1.0)


def _number(value: Any, where: str, least: float, most: float) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not least <= number <= most:
        raise UserError(f"{where} {quote(value)} is not a number from {least:g} to {most:g}.")
    return number


def _known(table: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in names:
            raise UserError(f"{where}: unknown key {quote(name)}.{did_you_mean(name, names)} Keys: {', '.join(names)}.")
