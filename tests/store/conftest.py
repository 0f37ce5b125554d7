"""Rows to store, and child processes to kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.store import RunFolder, row_key

VERSIONS = {"kvbench_version": "0.1.0", "torch_version": "2.13.0", "transformers_version": "5.17.0"}
CONFIG = {"task": ["walk"], "method": "gkv", "budget": 256, "seed": 1, "sampling": {"temperature": 0.6}}


def make_row(index: int, **changes: object) -> dict[str, Any]:
    """A full row; equal for equal arguments except for `created`."""
    row = {
        "row_key": row_key({"doc": f"q{index}", "budget": 256}),
        "task": "walk",
        "task_version": "1",
        "doc_id": f"q{index}",
        "sample": 0,
        "cluster_id": f"c{index // 2}",
        "method": "gkv",
        "options": {"window": 8, "alpha": 0.5},
        "budget": 256,
        "interval": 128,
        "decode_bounded": True,
        "model": "tiny",
        "seed": 2**64 - 1,
        "thinking": None,
        "temperature": 0.6,
        "status": "ok",
        "score": float(index % 3 == 0),
        "output_tokens": index,
        "kv_bytes_peak": 2**40,
        "entries_mean": 200.25,
        "decode_seconds": 0.5,
        "kvbench_version": "0.1.0",
    }
    return {**row, **changes}


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    return make_row


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., RunFolder]:
    """Start or continue the run r1 under tmp_path/results; keyword arguments as for RunFolder.open."""

    def start(**changes: Any) -> RunFolder:
        arguments: dict[str, Any] = {"config": CONFIG, "environment": VERSIONS, "planned": 10, **changes}
        return RunFolder.open(arguments.pop("out", tmp_path / "results"), arguments.pop("name", "r1"), **arguments)

    return start


@pytest.fixture
def filled(start: Callable[..., RunFolder]) -> Callable[..., Path]:
    """A run with `count` rows in its journal, sealed or not. Returns its folder."""

    def filled(count: int = 6, *, seal: bool = False, **changes: Any) -> Path:
        with start(**changes) as run:
            with run.journal() as journal:
                for i in range(count):
                    journal.append(make_row(i), prompt=f"question {i}", output=f"answer {i}\n\u2028 \x1b[2J é")
            if seal:
                run.seal()
            return run.path

    return filled


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code in a process of its own; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def child(code: str, *arguments: object) -> subprocess.Popen[str]:
        paths = [str(Path(kvbench.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        started.append(process)
        return process

    yield child
    for process in started:
        process.kill()
        process.communicate()
