"""The process that scores, started by `kvbench.scoring.pool` as ``python -m kvbench.scoring.worker``.

It reads length-prefixed pickles from standard input and answers on the original standard output; both ends are this
package, in one version, on one machine. It imports no torch. It ends when its input closes; a watchdog in C, which
needs no Python, ends it when a score hangs after its parent died.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import struct
import sys
from typing import IO, Any

from kvbench.scoring.failure import failure

MEMORY_LIMIT = 4 * 1024**3  # a runaway sympy expression must not take the machine
HEADER = struct.Struct(">Q")


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # Left to the parent, which waits for the running scores. A handler, because child programs inherit SIG_IGN.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: None)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    _limit_memory()
    send(answers, "ready")
    while (job := receive(sys.stdin.buffer)) is not None:
        module, file, payload, seconds = job
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            _import(module, file)
            task, doc, output = pickle.loads(payload)
            answer = ("score", task.score(doc, output))
        except BaseException as error:  # math-verify's time-out is a BaseException and may escape it
            answer = ("error", failure(error))
        faulthandler.cancel_dump_traceback_later()
        send(answers, answer)


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def _import(module: str, file: str | None) -> None:
    """Make a task's module known under its name, from its file when it is in no installed package (a plug-in)."""
    if module in sys.modules:
        return
    try:
        importlib.import_module(module)
    except ImportError:
        spec = importlib.util.spec_from_file_location(module, file) if file else None
        if spec is None or spec.loader is None:
            raise
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])


def _limit_memory() -> None:
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, ValueError, OSError):  # not supported here: the time limit still holds
        pass


if __name__ == "__main__":
    main()
