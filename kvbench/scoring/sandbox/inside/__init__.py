"""Texts that run inside the box. They are handed over as they are, import the standard library only, and find each
other under their bare names; nothing of the product can be imported there.

To the same Python they go compiled, which saves a tenth of a program's cost. Nothing comes back that way.
"""

from __future__ import annotations

import functools
import marshal
import struct
from pathlib import Path

PARTS = ("lockdown", "child", "driver")
REQUEST = struct.Struct(">cIIII")  # as in `driver`: kind, wall ms, CPU s, output limit, bytes that follow
REPLY = struct.Struct(">cIIIIII")  # as in `child`: state, code, ms, peak KiB, bytes of answer, stdout and stderr

_READ = {
    True: "import marshal\nread = lambda text, name: marshal.loads(bytes.fromhex(text))\n",
    False: "read = lambda text, name: compile(text, name, 'exec')\n",
}
_START = (
    "import gc, sys\n"
    "gc.disable()\n"  # on again in the child
    f"for name, text in zip({PARTS!r}, sys.argv[1:]):\n"
    "    sys.modules[name] = type(sys)(name)\n"
    "    exec(read(text, name), sys.modules[name].__dict__)\n"
    "sys.modules['driver'].main(read)\n"
)


def text(name: str) -> str:
    """The source of a module of this folder."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@functools.cache
def sent(source: str, name: str, compiled: bool) -> str:
    """A text as the driver takes it."""
    return marshal.dumps(compile(source, name, "exec")).hex() if compiled else source


@functools.cache
def command(python: str, *, compiled: bool = True) -> tuple[str, ...]:
    """What starts a driver: no site, no user folders, no writing of bytecode, UTF-8. `compiled`: it is this Python."""
    parts = (sent(text(name), f"{name}.py", compiled) for name in PARTS)
    return (python, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _READ[compiled] + _START, *parts)
