"""Command lines in forked processes: a process each, with its own files, signals and memory, without the seconds that
importing torch takes.

    command = Command("run --task walk ...", cwd=folder, before=lambda tell: watch(tell))
    for event in command.events(): ...
    ended = command.end()               # Ended(code, out, err)

`before` runs in the child before the command and may break there what a fault breaks. What it tells arrives at the
parent line by line, in order, and outlives a kill.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvbench.registry

Tell = Callable[[str], None]
Before = Callable[[Tell], None]

QUIET = {"KVBENCH_NO_PROGRESS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
IMPORTED = (
    *(
        "kvbench.cli.app",
        "kvbench.report.load",
        "kvbench.report.render",
        "kvbench.runner.rescore",
        "kvbench.runner.execute",
        "kvbench.report.stats",
    ),
    *("pandas", "pydantic.type_adapter", "pyarrow.dataset", "pyarrow.parquet", "scipy.stats"),
    *("transformers.generation.utils", "transformers.models.qwen3.modeling_qwen3"),
)
PATIENCE = 240.0  # seconds that a command may take on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative when a signal killed it."""

    code: int
    out: str
    err: str


class Command:
    """A started command line. Kill it or wait for its end; a test that does neither leaves it to `end_all`."""

    def __init__(
        self,
        line: str,
        *,
        cwd: Path,
        before: Before | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        warm()
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed by `close`
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            out = self._files[0].fileno() if stdout is None else stdout
            _child(shlex.split(line), cwd, before, env or {}, out, self._files[1].fileno(), writer)
        os.close(writer)
        self._pipe = os.fdopen(reader, "r", encoding="utf-8")
        self.code: int | None = None
        _started.append(self)

    def events(self) -> Iterator[str]:
        """What the child tells, until it ends."""
        for line in self._pipe:
            if line.endswith("\n"):  # a kill may cut the last one
                yield line[:-1]

    def wait_for(self, start: str) -> int:
        """Until the child tells a line that begins like this. Returns the number of acknowledged rows before it."""
        saved = 0
        for event in self.events():
            if event.startswith(start):
                return saved
            saved += event.startswith("saved")
        raise AssertionError(f"the command ended before it told {start!r}: {self.end()}")

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def send(self, number: int) -> None:
        if self.running():
            os.kill(self.pid, number)

    def end(self) -> Ended:
        """Wait for the end. What takes too long is killed and fails the test."""
        deadline = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"the command hangs: {self._read(1)}")
            time.sleep(0.005)
        return Ended(int(self.code or 0), self._read(0), self._read(1))

    def kill(self) -> Ended:
        """kill -9, unless it has ended."""
        self.send(signal.SIGKILL)
        return self.end()

    def close(self) -> None:
        """Free what it holds; kills it if it still runs."""
        self.kill()
        _started.remove(self)
        for file in (*self._files, self._pipe):
            file.close()

    def _read(self, number: int) -> str:
        size = os.fstat(self._files[number].fileno()).st_size
        return os.pread(self._files[number].fileno(), size, 0).decode(errors="replace")


_started: list[Command] = []


def end_all() -> None:
    """Kill what still runs and free what commands hold."""
    while _started:
        _started[-1].close()


def warm() -> None:
    """Import before the fork what every command would import after it."""
    for name in IMPORTED:
        importlib.import_module(name)
    for registry in (kvbench.registry.tasks, kvbench.registry.methods):
        for name in registry.names():
            registry.get(name)


def _child(
    argv: list[str], cwd: Path, before: Before | None, env: Mapping[str, str], out: int, err: int, pipe: int
) -> None:
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        for name in [n for n in os.environ if n.startswith("KVBENCH_")]:
            del os.environ[name]
        os.environ.update(QUIET | dict(env))
        sys.argv = ["kvbench", *argv]
        if before:
            before(lambda text: _tell(pipe, text))
        from kvbench.cli.app import main

        code = main(argv)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _tell(pipe: int, text: str) -> None:
    with suppress(BrokenPipeError):
        os.write(pipe, f"{text}\n".encode())


# --- what children do with themselves ---------------------------------------------------------------------------------


def at_steps(call: Callable[[str], None]) -> None:
    """Call this at every step of the store's writes (`kvbench.store.files.crash_point`)."""
    from kvbench.store import files

    original = files.crash_point
    for name, module in list(sys.modules.items()):
        if name.startswith("kvbench.store") and getattr(module, "crash_point", None) is original:
            module.crash_point = call  # type: ignore[attr-defined]


def at_saved(call: Callable[[str, int, str], None]) -> None:
    """Call this for every row as soon as the journal acknowledges it: key, number of its score, hash of its output."""
    import hashlib

    from kvbench.store import Journal

    written: dict[str, tuple[int, str]] = {}
    append = Journal.append

    def appending(self: Journal, row: Mapping[str, Any], **texts: Any) -> list[str]:
        output = texts.get("output")
        digest = "-" if output is None else hashlib.sha256(output.encode(errors="surrogatepass")).hexdigest()
        written[str(row["row_key"])] = (int(row.get("score_pass") or 0), digest)
        return append(self, row, **texts)

    def reporting(name: str) -> Callable[[Journal], list[str]]:
        original = getattr(Journal, name)

        def method(self: Journal) -> list[str]:
            keys: list[str] = original(self)
            for key in keys:
                if key in written:
                    call(key, *written.pop(key))
            return keys

        return method

    Journal.append = appending  # type: ignore[assignment,method-assign]
    for name in ("flush", "poll"):
        setattr(Journal, name, reporting(name))


def watch(tell: Tell, *, commit_seconds: float | None = None) -> None:
    """Tell every step as ``step NAME`` and every acknowledged row as ``saved KEY PASS HASH``.

    commit_seconds: commit this often instead of every two seconds, so that a run of seconds has many commits.
    """
    from kvbench.store import journal

    if commit_seconds is not None:
        journal.COMMIT_SECONDS = commit_seconds
    at_steps(lambda name: tell(f"step {name}"))
    at_saved(lambda key, score_pass, digest: tell(f"saved {key} {score_pass} {digest}"))


def hold(gate: Path, rows: int = 1) -> Before:
    """Stand still once so many rows are acknowledged, for as long as the file exists, inside the generation loop."""
    gate.touch()

    def before(tell: Tell) -> None:
        from kvbench.store import journal

        journal.COMMIT_SECONDS = 0.0
        count = 0

        def saved(key: str, score_pass: int, digest: str) -> None:
            nonlocal count
            count += 1
            tell(f"saved {key} {score_pass} {digest}")
            if count == rows:
                tell("holding")
                while gate.exists():
                    time.sleep(0.01)

        at_saved(saved)

    return before


def at_forward(call: Callable[[Any], None]) -> None:
    """Call this with the token ids of every forward pass of the model: [sequences, tokens]."""
    import torch

    embedding = torch.nn.functional.embedding

    def embed(input: Any, *arguments: Any, **options: Any) -> Any:
        call(input)
        return embedding(input, *arguments, **options)

    torch.nn.functional.embedding = embed
