"""Fixtures that run the command line in processes of its own, as a user would.

`calls` runs many command lines in one fresh interpreter (an interpreter each would take a second apiece) and says
after each whether torch has been imported by then; `kvbench` runs one in its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: a test asks no hub but one of its own

_BATCH = """
import contextlib, io, json, os, sys
from kvbench.cli.app import main
for argv, env in json.load(sys.stdin):
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.update(env)
    sys.argv = ["kvbench", *argv]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as leaving:
            code = leaving.code
    os.environ.clear(); os.environ.update(before)
    print(json.dumps([code, out.getvalue(), err.getvalue(), "torch" in sys.modules]), flush=True)
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    torch: bool | None = None


def _environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVBENCH_") and k not in ("COLUMNS", "LINES")}
    quiet = {"KVBENCH_NO_PROGRESS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return kept | quiet | dict(extra or {})


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloads and tables are kept in a folder of the tests, not in the user's."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(_cache: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_cache / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]))


@pytest.fixture(scope="session")
def calls() -> Callable[[Path, Sequence[tuple[list[str], dict[str, str]]]], list[Result]]:
    """calls(folder, [(argv, environment), ...]) in one interpreter, one after the other."""

    def run(folder: Path, lines: Sequence[tuple[list[str], dict[str, str]]]) -> list[Result]:
        done = subprocess.run(
            [sys.executable, "-c", _BATCH],
            input=json.dumps([list(line) for line in lines]),
            capture_output=True,
            text=True,
            cwd=folder,
            env=_environment(),
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return [Result(*json.loads(line)) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="session")
def kvbench() -> Callable[..., Result]:
    """kvbench("run", "--help", cwd=folder, env={...}) in its own process."""

    def run(*argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Result:
        command = [sys.executable, "-m", "kvbench", *argv]
        done = subprocess.run(command, capture_output=True, cwd=cwd, env=_environment(env), timeout=600)
        return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    return run
