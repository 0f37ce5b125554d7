"""Command lines in forked copies of one process that has imported everything: an interpreter each would take seconds.

    with Zygote(folder) as zygote:
        case = zygote.start("report r1", block="kvbench.report.load:load")
        case.wait_for_block()
        case.signal(signal.SIGTERM)
        code, err = case.end()

`block` names a function; the command stops where it calls it for the `calls`-th time, until a signal comes: in Python,
where handlers run ("python"), or in a C function that gives them no chance ("c").
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 240.0  # seconds that a busy machine may need for anything


class Case:
    """One command line under way."""

    def __init__(self, zygote: Zygote, pid: int, folder: Path) -> None:
        self.zygote, self.pid, self.folder = zygote, pid, folder

    def wait_for_block(self) -> int:
        """Wait until the command stopped; the process that did, which may be a child of the command."""
        return int(self._wait_for("blocked"))

    def wait_for(self, name: str) -> str:
        return self._wait_for(name)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Exit code (negative: by a signal) and what was written to standard error."""
        code = self.zygote.ask({"wait": self.pid})
        return int(code), (self.folder / "err").read_text()

    def _wait_for(self, name: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while not (path := self.folder / name).exists() or not path.read_text():
            assert time.monotonic() < deadline, (self.folder / "err").read_text()
            assert self.zygote.ask({"alive": self.pid}), (self.folder / "err").read_text()
            time.sleep(0.05)
        return path.read_text()


class Zygote:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __enter__(self) -> Zygote:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVBENCH_NO_PROGRESS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, line: str, **how: Any) -> Case:
        self.count += 1
        folder = self.folder / f"case{self.count}"
        folder.mkdir()
        pid = self.ask({"line": line, "cwd": str(self.folder), "case": str(folder), **how})
        return Case(self, pid, folder)


def _block(target: str, case: Path, how: str, calls: int) -> None:
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, seen = getattr(owner, name), [0]

    def blocked(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] < calls:
            return original(*args, **kwargs)
        if how == "after":
            (case / "began").write_text("x")
            result = original(*args, **kwargs)
            (case / "ended").write_text("x")
            return result
        (case / "blocked").write_text(str(os.getpid()))
        if how == "c":
            import hashlib

            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        time.sleep(600)
        raise AssertionError("no signal came")

    setattr(owner, name, blocked)


def _run(job: dict[str, Any]) -> None:
    """In the forked copy: one command line, to its end."""
    case = Path(job["case"])
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(case / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    sys.argv = ["kvbench", *job["line"].split()]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it
    for number in job.get("ignore", ()):
        signal.signal(number, signal.SIG_IGN)
    if block := job.get("block"):
        _block(block, case, job.get("how", "python"), job.get("calls", 1))
    with contextlib.suppress(ImportError):
        from kvbench.console import signals

        signals.PATIENCE = job.get("patience", signals.PATIENCE)
    from kvbench.__main__ import main

    sys.exit(main())


def _serve() -> None:
    import transformers  # noqa: F401

    import kvbench.cli.app
    import kvbench.runner.bench.rounds
    import kvbench.runner.execute  # noqa: F401

    ended: dict[int, int] = {}
    for text in sys.stdin:
        job = json.loads(text)
        if "line" in job:
            pid = os.fork()
            if pid == 0:
                _run(job)
            answer: Any = pid
        elif "alive" in job:
            pid, status = os.waitpid(job["alive"], os.WNOHANG)
            if pid:
                ended[pid] = status
            answer = not pid
        else:
            pid = job["wait"]
            status = ended[pid] if pid in ended else os.waitpid(pid, 0)[1]
            answer = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
