"""Source texts that run inside a box. They import the standard library only, and each other by their bare names;
kvbench cannot be imported there.

A box that runs the same Python as kvbench gets the texts compiled, which saves a tenth of a program's cost. kvbench
loads no compiled code that comes out of a box.
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
    """Return the source text of one of the modules in this folder."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@functools.cache
def sent(source: str, name: str, compiled: bool) -> str:
    """Return a source text as the driver expects it: in hexadecimal compiled form if `compiled`, else unchanged. The
    compiled text does not inherit this module's `from __future__`, which a harness would pass on to programs."""
    return marshal.dumps(compile(source, name, "exec", dont_inherit=True)).hex() if compiled else source


@functools.cache
def command(python: str, *, compiled: bool = True) -> tuple[str, ...]:
    """Return the command that starts a driver with this Python. compiled: whether this is the Python that runs kvbench,
    which can read the source texts in compiled form."""
    parts = (sent(text(name), f"{name}.py", compiled) for name in PARTS)
    return (python, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _READ[compiled] + _START, *parts)
