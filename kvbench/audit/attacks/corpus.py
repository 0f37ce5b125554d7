"""Runs a corpus of hostile programs in the sandbox, and reports which programs succeed.

    python -m kvbench.audit.attacks.corpus < attacks.json        # {"name": "text of a program", ...}

Each program runs in every tier of the sandbox (a tier is one way to isolate a program) that works on this machine. The
module prints one JSON line per program and tier. `kvbench.audit.attacks.program` describes the programs and their
targets. A new process runs each program in the same way as scoring does. The programs run as the user who starts this
module. If root starts the command that audits the sandbox, the programs run twice: as root, and then as an ordinary
user (`kvbench.audit.attacks.ordinary`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.audit.attacks.program import Attack, Targets, targets
from kvbench.audit.attacks.watch import Peaks, adopting_orphans, survivors, watch
from kvbench.console import signals
from kvbench.errors import UserError, quote
from kvbench.scoring.sandbox import SelfTest, findings

LIMITS = {"wall": 3.0, "mem": 512 << 20, "fsize": 16 << 20, "out": 1 << 20}
_GRADER_SECONDS = 60.0
_SLACK_SECONDS = 2.0  # beyond the wall limit
_MOST = {"processes": 80, "threads": 200, "disk": 96 << 20, "output": 4 << 20, "grader": 300 << 20}
_MEMORY = 1.25 * LIMITS["mem"]

Row = dict[str, Any]


def read_corpus(folder: Path) -> dict[str, str]:
    """Return the text of every hostile program in a folder and its direct subfolders, by relative path.

    A hostile program is a Python file that begins with ``# id:``. Raises UserError if the folder holds no program, or
    if a program has no complete header.
    """
    programs = {}
    for path in sorted((*folder.glob("*.py"), *folder.glob("*/*.py"))):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        if text.startswith("# id:"):
            programs[str(path.relative_to(folder))] = text
    for name, text in programs.items():
        try:
            Attack.read(text, name)
        except ValueError as error:
            raise UserError(f"{quote(folder)}: {error}.") from None
    if not programs:
        raise UserError(f"{quote(folder)} holds no hostile programs; expected Python files that begin with '# id:'.")
    return programs


def audit(corpus: Mapping[str, str], reports: Sequence[SelfTest]) -> Iterator[Row]:
    """Run every program in every tier of `reports` whose self-test found no problem; yield one result per program and
    tier."""
    attacks = [Attack.read(text, name) for name, text in corpus.items()]
    with adopting_orphans():
        for report in reports:
            if not report.problems:
                for attack in attacks:
                    yield _run(attack, report.tier)


def _run(attack: Attack, tier: str) -> Row:
    pairs = [(secrets.randbelow(9 * 10**15) + 10**15, secrets.randbelow(9 * 10**15) + 10**15) for _ in range(2)]
    padding = "\n" + "0" * attack.stdin_bytes
    tests: list[Row] = [{"stdin": f"{a} {b}{padding}\n", "args": [a, b], "expected": str(a + b)} for a, b in pairs]
    with targets(tests[0]["expected"]) as aims:
        memory = [secrets.token_hex(8), secrets.token_hex(8)]
        result_file = aims.folder / "result.json"
        program = {"source": attack.filled(aims.values), "mode": attack.mode, "tests": tests}
        aim = {"path": str(aims.values["GRADER_PATH"]), "memory": memory, "result": str(result_file)}
        job = program | aim | {"limits": LIMITS, "tier": tier}
        (aims.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "kvbench.audit.attacks.grader", str(aims.folder / "job.json")]
        grader = subprocess.Popen(
            [*command, "--api-key", aims.canaries["argument"]],
            env=aims.environment(),
            cwd=aims.temporary,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        port = aims.values["LISTEN_PORT"] if "listen" in attack.checks else None
        signals.at_end(grader.kill)
        peaks = watch(grader, aims.temporary, port, aims.sentinel.pid, _GRADER_SECONDS)
        signals.not_at_end(grader.kill)
        alive = survivors([grader.pid, aims.sentinel.pid])
        result = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
        secret = [*aims.canaries.values(), "CANARY-" + "".join(memory)]
        if {"leak", "verdict"} <= set(attack.checks):
            secret.append(tests[0]["expected"])
        successes = list(_successes(attack, aims, peaks, alive, result, secret))
    status = str(result.get("status", "no result"))
    return {
        "attack": attack.id,
        "class": attack.kind,
        "tier": tier,
        "user": os.geteuid(),
        "status": status,
        "status_as_expected": attack.expected_status in ("any", status),
        "seconds": round(result.get("seconds", 0.0), 2),
        "successes": successes,
    }


def _successes(
    attack: Attack, aims: Targets, peaks: Peaks, alive: list[int], result: Row, secret: list[str]
) -> Iterator[str]:
    """Yield the names of the checks that show harm, that is, the ways in which the attack succeeded.

    The function makes the checks that the attack's header names, and two more: "damage" (the grader failed, or the
    sentinel process ended) and "sandbox_error" (the sandbox failed). An unknown check in the header counts as harm.

    alive: ids of the processes that outlived the grader. result: what the grader reported. secret: texts that the
    program must not see.
    """
    out = result.get("stdout", "") + result.get("stderr", "")
    seen = out + b"".join(aims.received).decode("latin-1")
    rules: dict[str, Callable[[], bool]] = {
        "leak": lambda: any(text in seen for text in secret),
        "net": lambda: bool(aims.reached),
        "listen": lambda: peaks.listened,
        "changed": aims.changed,
        "marker": lambda: f"REACHED-{aims.values['TOKEN']}" in out,
        "survivor": lambda: bool(alive),
        "verdict": lambda: bool(result.get("passed")),
        "procs": lambda: peaks.processes > _MOST["processes"],
        "threads": lambda: peaks.threads > _MOST["threads"],
        "rss": lambda: peaks.memory > _MEMORY,
        "shmem": lambda: peaks.shared > _MEMORY,
        "disk": lambda: max(peaks.disk, peaks.shared) > _MOST["disk"],
        "output": lambda: len(out) > _MOST["output"] or peaks.grader_memory > _MOST["grader"],
        "wall": lambda: result.get("seconds", _GRADER_SECONDS) > LIMITS["wall"] + _SLACK_SECONDS,
        "residue": lambda: bool(aims.left()),
        "sandbox_error": lambda: result.get("status") == "sandbox_error",
        "damage": lambda: not result or "damage" in result or aims.sentinel.poll() is not None,
    }
    for check in dict.fromkeys((*attack.checks, "damage", "sandbox_error")):
        if check not in rules:
            yield f"unknown check {check}"
        elif rules[check]():
            yield check


def main() -> None:
    corpus = json.load(sys.stdin)
    for row in audit(corpus, findings()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
