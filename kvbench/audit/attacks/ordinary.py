"""Runs a module of kvbench as an ordinary user; must be started as root.

    python -m kvbench.audit.attacks.ordinary FOLDER MODULE

The ordinary user cannot read a Python interpreter or a copy of kvbench that lies in root's private home. So this
process mounts them below FOLDER, in a mount namespace that only it and its children see.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import kvbench
from kvbench.scoring.sandbox import interpreter

NOBODY = 65534
_NEWNS, _BIND_ALL, _PRIVATE_ALL = 0x20000, 0x5000, 0x44000  # CLONE_NEWNS; MS_BIND | MS_REC, MS_PRIVATE | MS_REC


def main(folder: str, module: str) -> None:
    """Drop root's rights, and execute the module as the user `nobody`. Raises OSError."""
    program, code = Path(interpreter.program()), Path(kvbench.__file__).parent.parent
    prefix = Path(interpreter.prefix())
    if not interpreter.readable_by_others([str(program), os.__file__]):
        _show(prefix, Path(folder, "python"))
        program = Path(folder, "python") / program.relative_to(prefix)
        prefix = Path(folder, "python")
    if not interpreter.readable_by_others([kvbench.__file__]):
        _show(code, Path(folder, "code"))
        code = Path(folder, "code")
    libraries = ":".join(str(prefix / name) for name in interpreter.shared_library_path())
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
    extra = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    own = {"PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execve(program, [str(program), "-P", "-m", module], kept | extra | own)


def _show(source: Path, target: Path) -> None:
    """Mount the folder `source` also at the path `target`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    target.mkdir()
    calls = (
        lambda: libc.unshare(_NEWNS),
        lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE_ALL), None),
        lambda: libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(_BIND_ALL), None),
    )
    for call in calls:
        if call() != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(source))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
