"""Names that a run may have.

A run's name becomes a folder's name on any system that the results may be copied to, so it is kept to letters, digits
and three signs, and free of the names that Windows reserves. Task and method names are checked by their registries,
not here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kvbench.errors import UserError, show

LIMIT = 100
OUT = "results"  # where runs are when --out is not given
_RESERVED = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(?:\..*)?", re.IGNORECASE)


def check_run_name(name: str, option: str = "--run-name") -> str:
    """The name itself, or a UserError that says what is wrong with it."""
    for position, character in enumerate(name):
        if ord(character) < 32 or 127 <= ord(character) < 160:
            code = f"U+{ord(character):04X}"
            raise UserError(f"{option} has a control character ({code}) at position {position}. It reads {show(name)}.")
    if len(name) > LIMIT:
        raise UserError(f"{option} is {len(name)} characters long; the limit is {LIMIT}.")
    if not name:
        raise UserError(f"{option} is empty; give a name of letters, digits, '.', '-', '_'.")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        allowed = "only letters, digits, '.', '-', '_' are allowed; no '/', no leading '.'"
        raise UserError(f"{option} {show(name)}: {allowed}.")
    if _RESERVED.fullmatch(name) or name.endswith("."):
        raise UserError(f"{option} {show(name)} cannot be a folder's name on Windows; give another name.")
    return name


def resume_command(run_dir: Path) -> str:
    """What to type to continue a run."""
    return f"kvbench run --resume {run_dir.name}{_out(run_dir)}"


def repair_command(run_dir: Path) -> str:
    """What to type to make a run's tables anew."""
    return f"kvbench repair {run_dir.name}{_out(run_dir)}"


def _out(run_dir: Path) -> str:
    return "" if run_dir.parent == Path(OUT) else f" --out {shlex.quote(str(run_dir.parent))}"
