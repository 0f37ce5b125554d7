"""A harness that runs a compiler. Its standard input is the source text; its standard output is the binary.

The box must be one for compilers (`Sandbox.compiler_box`). The exit code is the compiler's, or 1 if a signal ended it.
"""

import os
from collections.abc import Callable
from typing import Any

_command: list[str] = []
_path = ""


def setup(options: dict[str, Any]) -> None:
    """Store the compiler's command without the output file (`options["command"]`) and its variable PATH
    (`options["path"]`). Called before the fork."""
    global _command, _path
    _command, _path = options["command"], options["path"]


def main(program: str, ask: Callable[[], bytes | None], tell: Callable[[bytes], None]) -> int:
    # HOME, CCACHE_DISABLE: ccache, which may stand in for a compiler, needs a home and has no place for a cache.
    environment = {"PATH": _path, "LC_ALL": "C", "TMPDIR": ".", "HOME": ".", "CCACHE_DISABLE": "1"}
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    try:
        process = os.posix_spawn(_command[0], [*_command, "-o", "program"], environment, file_actions=silent)
    except OSError as error:
        os.write(2, f"cannot start {_command[0]}: {error.strerror}\n".encode())
        return 1
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code == 0:
        with open("program", "rb") as binary, open(1, "wb", closefd=False) as out:
            out.write(binary.read())
    return code if code >= 0 else 1
