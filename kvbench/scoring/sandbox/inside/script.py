"""A harness that runs a program as a script, with standard input and output, after an optional prelude.

It defines `exit` and `quit`, because Python runs without the module `site`, which usually defines them. A box has no
/dev/stdin: `open` opens descriptor 0 for this name, which the program may read anyway. The exit code is that of the
program, or `MEMORY` after a MemoryError.
"""

import _sitebuiltins
import atexit
import builtins
import contextlib
import functools
import gc
import io
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

MEMORY = 86
STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_main = types.ModuleType("__main__")
_opened = io.open


def setup(options: dict[str, Any]) -> None:
    """Import the packages that the program mentions and run the prelude, once, before the fork."""
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    for name in options.get("preload", ()):
        __import__(name)
    exec(options.get("prelude", ""), _main.__dict__)


def main(program: str, ask: Callable[[], bytes | None], tell: Callable[[bytes], None]) -> int:
    sys.modules["__main__"] = _main
    io.open = builtins.open = functools.partial(_open)  # unlike a function, never bound as a method
    current = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr, "open": io.open}
    for name in current.keys() & _main.__dict__.keys():  # a prelude imported those of the driver
        setattr(_main, name, current[name])
    code = 0
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), _main.__dict__)
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except MemoryError:
        code = MEMORY
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    return _end() or code


def _open(file: Any, *arguments: Any, **named: Any) -> Any:
    if isinstance(file, (str, os.PathLike)) and os.fspath(file) in STDIN:
        named["opener"] = lambda path, flags: os.dup(0)  # called after the other arguments are checked
    return _opened(file, *arguments, **named)


def _end() -> int:
    """Join threads, run exit functions and flush open files, as Python does at a script's end; run no finalisers.
    Return 1 if a thread's end or a flush of a standard stream raises an exception, else 0."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return 1
    for thing in gc.get_objects():
        if isinstance(thing, io.IOBase) and not thing.closed:
            with contextlib.suppress(BaseException):
                thing.flush()
    return 0


def _exit_code(given: Any) -> int:
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    sys.stderr.write(f"{given}\n")
    return 1
