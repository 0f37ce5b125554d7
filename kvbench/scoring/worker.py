"""The scoring process, which `kvbench.scoring.pool` starts as ``python -m kvbench.scoring.worker``.

It reads length-prefixed pickles from standard input and answers on the original standard output. Pickles are safe here,
because both ends are the same version of kvbench on one machine. The process ends when its input closes. It imports
torch only if a task's module does. If a score hangs after the parent died, faulthandler's watchdog thread, written in
C, ends the process.
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
import types
from typing import IO, Any

from kvbench.scoring.failure import failure

MEMORY_LIMIT = 4 * 1024**3  # bytes; a runaway sympy expression must not exhaust the machine's memory
HEADER = struct.Struct(">Q")
_SOURCE = "__kvbench_source__"  # attribute of a plug-in's module


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # The parent handles these signals and waits for the scores. SIG_IGN would be inherited by child programs.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: None)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # send libraries' prints to standard error, so that they do not mix with the answers
    _limit_memory()
    send(answers, "ready")
    while (job := receive(sys.stdin.buffer)) is not None:
        module, file, source, payload, seconds = job
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            _import(module, file, source)
            task, doc, output = pickle.loads(payload)
            answer = ("score", task.score(doc, output))
        except BaseException as error:  # math-verify's time-out is a BaseException that it may fail to catch
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


def run_source(module: str, file: str, source: bytes) -> None:
    """Import a module whose code is `source`, the content that the file `file` had when it was hashed.

    Python reads neither the file, which may have changed, nor a compiled copy of it. `source_of` returns the source
    again, so that scoring processes run the same code.
    """
    made = sys.modules[module] = types.ModuleType(module)  # dataclasses look their module up by name
    made.__file__ = file
    vars(made)[_SOURCE] = source
    try:
        exec(compile(source, file, "exec", dont_inherit=True), made.__dict__)
    except BaseException:
        sys.modules.pop(module, None)
        raise


def source_of(module: str) -> bytes | None:
    """Return the code of a module that `run_source` imported; None for any other module."""
    return getattr(sys.modules.get(module), _SOURCE, None)


def _import(module: str, file: str | None, source: bytes | None) -> None:
    """Import a task's module. A plug-in's module is imported from its source. Other modules are imported by name or, if
    they belong to no installed package, from `file`."""
    if module in sys.modules:
        return
    if source is not None:
        run_source(module, str(file), source)
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
    except (ImportError, ValueError, OSError):  # the system has no such limit; the time limit still holds
        pass


if __name__ == "__main__":
    main()
