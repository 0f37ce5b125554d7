"""``kvbench audit --sandbox DIR``: runs hostile programs in the sandbox, once for each tier (way to isolate a program)
that works on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.cli.counter import Counter
from kvbench.console import terminal
from kvbench.errors import SetupError
from kvbench.scoring.sandbox import SelfTest, findings


def audit_sandbox(folder: Path, *, as_json: bool, throughput: bool, quiet: bool) -> int:
    """Run the hostile programs of `folder` in each tier that works here, and return exit code 1 if an attack succeeds
    or a program could not be run, otherwise 0.

    If the process runs as root, the programs run a second time as an ordinary user. Raises SetupError if no tier works.
    """
    from kvbench.audit.attacks.corpus import audit, read_corpus
    from kvbench.audit.attacks.grader import BY_NAME
    from kvbench.audit.attacks.throughput import measure

    corpus, reports = read_corpus(folder), findings()
    good = [report for report in reports if not report.problems]
    if not good:
        raise SetupError("no sandbox works here: " + "; ".join(f"{r.tier}: {r.problems[0]}" for r in reports) + ".")
    root = os.geteuid() == 0
    rows: list[dict[str, Any]] = []
    missing = ""
    with Counter("attacks", len(corpus) * len(good) * (1 + root), quiet=quiet) as counter:

        def add(row: dict[str, Any]) -> None:
            rows.append(row)
            counter.advance(f"{row['attack']} {row['tier']} as {row['user']}")

        for row in audit(corpus, reports):
            add(row)
        if root:
            try:
                for row in _as_ordinary_user(corpus):
                    add(row)
            except OSError as error:
                missing = str(error)
    speeds = [measure(BY_NAME[report.tier]()) for report in good] if throughput else []
    succeeded = [row for row in rows if row["successes"]]
    document = {
        "folder": str(folder),
        "tiers": [{"tier": r.tier, "works": not r.problems, "problems": list(r.problems)} for r in reports],
        "attacks": rows,
        "succeeded": len(succeeded),
        "unexpected_statuses": sum(not row["status_as_expected"] for row in rows),
        "not_checked": [missing] if missing else [],
        "throughput": speeds,
    }
    if as_json:
        terminal.data(document)
    else:
        _show(document, reports)
    return 1 if succeeded or missing else 0


def _as_ordinary_user(corpus: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Run all attacks again in a process of an ordinary user, and yield the result of each.

    corpus: hostile programs by name. Raises OSError if no attack ran, or if the process failed after some attacks.
    """
    with tempfile.TemporaryDirectory(prefix="kvbench-ordinary-") as folder, tempfile.TemporaryFile() as errors:
        os.chmod(folder, 0o755)
        command = [sys.executable, "-P", "-m", "kvbench.audit.attacks.ordinary", folder, "kvbench.audit.attacks.corpus"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd="/"
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(dict(corpus)).encode())
                process.stdin.close()
            count = 0
            for line in process.stdout:
                count += 1
                yield json.loads(line)
            code = process.wait()
        if code or not count:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise OSError(
                f"not every attack ran as an ordinary user: {lines[-1] if lines else 'no tier works for that user'}"
            )


def _show(document: Mapping[str, Any], reports: list[SelfTest]) -> None:
    places = list(dict.fromkeys((row["tier"], row["user"]) for row in document["attacks"]))
    names = [f"{tier}, {'root' if user == 0 else f'uid {user}'}" for tier, user in places]
    by_attack: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for row in document["attacks"]:
        by_attack.setdefault(row["attack"], {})[row["tier"], row["user"]] = row
    lines = []
    for attack, rows in by_attack.items():
        cells = [_cell(rows[place]) if place in rows else "-" for place in places]
        lines.append((terminal.clean(attack), terminal.clean(next(iter(rows.values()))["class"]), *cells))
    terminal.table(("attack", "class", *names), lines)
    for report in reports:
        if report.problems:
            print(f"{report.tier} does not work here: {terminal.clean(report.problems[0])}.")
    for reason in document["not_checked"]:
        terminal.warning(terminal.clean(reason))
    for speed in document["throughput"]:
        print(
            "{tier}: {programs} programs with one test in {programs_seconds} s by {workers} workers, "
            "one program with {tests} tests in {tests_seconds} s.".format(**speed)
        )
    print(
        f"{document['succeeded']} of {len(document['attacks'])} attacks succeeded; "
        f"{document['unexpected_statuses']} ended with another status than their header states."
    )


def _cell(row: Mapping[str, Any]) -> str:
    if row["successes"]:
        return "SUCCEEDED: " + ", ".join(map(terminal.clean, row["successes"]))
    return "blocked" if row["status_as_expected"] else f"blocked ({terminal.clean(row['status'])})"
