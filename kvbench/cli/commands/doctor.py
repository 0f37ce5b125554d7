"""``kvbench doctor``: checks this machine's versions, devices, memory and folders. Exit code 3 reports a problem."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.cli.options import Document, Out
from kvbench.console import terminal
from kvbench.console.progress import size
from kvbench.errors import KVBenchError, SetupError
from kvbench.runner import env
from kvbench.sources.models import TINY, describe
from kvbench.store import check_writable

EPILOG = """Examples:
  kvbench doctor
  kvbench doctor --json
"""


def doctor(out: Out = "results", json: Document = False) -> None:
    """Check this machine: versions, devices, memory, threads, the built-in model, data and results folders."""
    checks = [_check(name, probe) for name, probe in _probes(out)]
    bad = [check for check in checks if not check["ok"]]
    if json:
        terminal.data({"ok": not bad, "checks": checks})
    else:
        rows = [(c["check"], "ok" if c["ok"] else "PROBLEM", terminal.clean(c["found"])) for c in checks]
        terminal.table(("check", "", "found"), rows)
    if bad:
        raise SetupError(f"{len(bad)} of {len(checks)} checks found a problem: {', '.join(c['check'] for c in bad)}.")


def _probes(out: str) -> list[tuple[str, Callable[[], str]]]:
    versions = env.versions()
    return [
        *((name, lambda v=v: v) for name, v in versions.items()),
        *((f"needs {name}", lambda name=name: _missing(name)) for name in env.PACKAGES if name not in versions),
        ("git commit", lambda: env.git_commit() or "none: kvbench does not run from a git work tree"),
        ("machine", lambda: "{processor}, {cores} cores, {platform}".format(**env.machine())),
        ("memory", lambda: size(env.memory_bytes() or 0)),
        ("threads", _threads),
        ("accelerators", _accelerators),
        ("built-in model", lambda: f"{describe(TINY).folder}, context {describe(TINY).context}"),
        ("sandbox", _sandbox),
        ("data folder", _data),
        ("results folder", lambda: _writable(out)),
    ]


def _check(name: str, probe: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"check": name, "ok": True, "found": probe()}
    except (KVBenchError, OSError, ImportError) as error:
        return {"check": name, "ok": False, "found": str(error)}


def _writable(out: str) -> str:
    check_writable(out)
    return f"{out} can be written"


def _missing(package: str) -> str:
    raise SetupError(f"package {package} is not installed.")


def _threads() -> str:
    import torch

    return f"torch uses {torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})"


def _accelerators() -> str:
    found = (f"{d['device']} {d['name']} {size(d['memory_bytes'])}" for d in env.devices())
    return "; ".join(found) or "none; runs on the CPU"


def _sandbox() -> str:
    """Return one line on which tiers of the sandbox work here, and why the others do not. Only tasks that run programs
    need a sandbox."""
    from kvbench.scoring.sandbox import findings

    return "; ".join(f"{r.tier} {f'does not work: {r.problems[0]}' if r.problems else 'works'}" for r in findings())


def _data() -> str:
    folder = os.environ.get("KVBENCH_DATA")
    if not folder:
        return "KVBENCH_DATA not set; bundled data and the hub are used"
    if not Path(folder).is_dir():
        raise SetupError(f"KVBENCH_DATA={folder} is not a folder.")
    return folder
