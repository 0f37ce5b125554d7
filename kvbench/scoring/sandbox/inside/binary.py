"""A harness that becomes a compiled program. Its standard input is one file: the program, then the program's own input.

The box must allow `exec` (`Sandbox.box(compiled=True)`). The program must be linked statically, since it finds no
library.
"""

import os
from collections.abc import Callable
from typing import Any

_size = 0


def setup(options: dict[str, Any]) -> None:
    """Store how many bytes of standard input are the program (`options["size"]`). Called before the fork."""
    global _size
    _size = options["size"]


def main(program: str, ask: Callable[[], bytes | None], tell: Callable[[bytes], None]) -> int:
    file = os.dup(0)
    os.lseek(0, _size, os.SEEK_SET)
    os.execve(file, ["program"], {})
