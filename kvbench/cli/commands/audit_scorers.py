"""``kvbench audit --scorers DIR``: compares kvbench's scorers with recorded results of the official scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.cli.counter import Counter
from kvbench.console import terminal
from kvbench.errors import quote

if TYPE_CHECKING:
    from kvbench.audit.scorers import ScoredGolden

SHOWN = 3  # printed differences per file


def audit_scorers(folder: Path, *, as_json: bool, quiet: bool) -> int:
    """Score recorded answers with kvbench's scorers, and print whether the scores equal those of the official scorers.

    folder: holds the files with the answers and the official scores. Returns exit code 0 if there are answers and all
    scores are equal, otherwise 1.
    """
    from kvbench.audit import scorers

    goldens = scorers.read_goldens(folder)
    rows = []
    with Counter("rows", sum(map(len, goldens.values())), quiet=quiet) as counter:
        for row in scorers.audit(goldens):
            rows.append(row)
            counter.advance(row.file)
    equals = {name: [row.equal for row in rows if row.file == name] for name in goldens}
    files = [{"file": name, "rows": len(values), "equal": sum(values)} for name, values in equals.items()]
    equal = bool(rows) and all(row.equal for row in rows)
    if as_json:
        document = {"folder": str(folder), "equal": equal, "files": files}
        terminal.data(document | {"rows": [asdict(row) | {"equal": row.equal} for row in rows]})
    else:
        _print(files, rows, equal)
    return 0 if equal else 1


def _print(files: Sequence[dict[str, Any]], rows: Sequence[ScoredGolden], equal: bool) -> None:
    verdicts = ("ok" if f["equal"] == f["rows"] else "DIFFERS" for f in files)
    lines = [(f["file"], str(f["rows"]), str(f["equal"]), verdict) for f, verdict in zip(files, verdicts, strict=True)]
    terminal.table(("file", "rows", "equal", ""), lines, right=("rows", "equal"))
    for file in files:
        wrong = [row for row in rows if row.file == file["file"] and not row.equal]
        for row in wrong[:SHOWN]:
            print(terminal.clean(f"{row.id} ({row.note}): {_what(row)}"))
        if len(wrong) > SHOWN:
            print(f"... and {len(wrong) - SHOWN} more of {file['file']}")
    verdict = "all equal" if equal else "SCORERS DIFFER" if rows else "nothing was compared"
    print(f"{sum(row.equal for row in rows)} of {len(rows)} rows in {len(files)} files: {verdict}.")


def _what(row: ScoredGolden) -> str:
    if row.error:
        return row.error
    return "; ".join(
        f"{name} is {quote(row.found[name])}, expected {quote(row.expected[name])}" for name in row.differences
    )
