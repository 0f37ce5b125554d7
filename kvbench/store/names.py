"""Checks the names of runs.

A run's name is also the name of its folder, which must be valid on every system to which the results are copied. A name
therefore has at most `LIMIT` characters: ASCII letters, digits and the three signs ``.``, ``-`` and ``_``. It does not
begin or end with ``.``, and is not a name that Windows reserves.
"""

from __future__ import annotations

import re

from kvbench.errors import UserError, quote

LIMIT = 100
_RESERVED = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(?:\..*)?", re.IGNORECASE)


def check_run_name(name: str, option: str = "--run-name") -> str:
    """Return the name if it is valid. Raises UserError for an invalid name. option: the flag with which the user gave
    the name, for the message."""
    for position, character in enumerate(name):
        if ord(character) < 32 or 127 <= ord(character) < 160:
            code = f"U+{ord(character):04X}"
            raise UserError(
                f"{option} has a control character ({code}) at position {position}. Remove it from {quote(name)}."
            )
    if len(name) > LIMIT:
        raise UserError(f"{option} is {len(name)} characters long; the limit is {LIMIT}. Give a shorter name.")
    if not name:
        raise UserError(f"{option} is empty; give a name of letters, digits, '.', '-', '_'.")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        allowed = "only letters, digits, '.', '-', '_' are allowed; no '/', no leading '.'"
        raise UserError(f"{option} {quote(name)}: {allowed}.")
    if _RESERVED.fullmatch(name) or name.endswith("."):
        raise UserError(f"{option} {quote(name)} cannot be a folder's name on Windows; give another name.")
    return name


def is_run_name(name: object) -> bool:
    try:
        return isinstance(name, str) and check_run_name(name) == name
    except UserError:
        return False
