"""Prints a replay, and writes its folder: tidy tables, and one JSON document with everything needed to repeat it.

replay.csv        a row per task, method and budget
traces.parquet    a row per trace of these
heads.parquet     a row per query head of these
replay.json       settings, versions, the rows, and the methods that were left out

For analyses:

overlap.csv, ...  the rows of each analysis; tokens.parquet, as its rows hold text of a model
overlap.svg, ...  its figures, as PDF too; tokens.html
analyses.json     settings, versions, and the methods that were left out
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.console import terminal
from kvbench.eviction.budget import label
from kvbench.replay.analyses.api import Analysis, Row
from kvbench.replay.batches import Result
from kvbench.report import plots
from kvbench.store import check_out
from kvbench.store.files import replacing

LEGEND = """\
loss +: what eviction adds, in nats per token; low, high: over tokens of which the full cache is
sure, and over others. gap closed: 0 is random, 1 is golden, the oracle. loss ratio, with its error:
to the loss of the full cache, and huge where that is next to nothing. *: evicts the prompt only,
and so holds more entries. docs/replay.md explains every column.
"""


def write(out: str, results: Sequence[Result], document: Mapping[str, Any]) -> Path:
    """Write a comparison to the folder `out`, replacing earlier files; return the folder.

    Raises SetupError, UserError when the folder cannot be written.
    """
    import pandas as pd

    folder = check_out(out)
    rows = pd.DataFrame([row for result in results for row in result.rows]).astype({"budget": "Int64"})
    _put(folder / "replay.csv", rows.to_csv(index=False).encode())
    for name in ("traces", "heads"):
        table = pd.DataFrame([row for result in results for row in getattr(result, name)])
        buffer = io.BytesIO()
        table.astype({"budget": "Int64", "budget_share": "Float64"}).to_parquet(buffer, index=False)
        _put(folder / f"{name}.parquet", buffer.getvalue())
    _put(folder / "replay.json", (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    return folder


def write_analyses(out: str, found: Mapping[type[Analysis], Sequence[Row]], document: Mapping[str, Any]) -> Path:
    """Write the rows and figures of every analysis to the folder `out`, replacing earlier files. Raises as `write`."""
    import pandas as pd

    folder = check_out(out)
    for kind, rows in found.items():
        table = pd.DataFrame(list(rows))
        whole = {name: "Int64" for name in ("budget", "layer", "head") if name in table}
        table = table.astype(whole | ({"budget_share": "Float64"} if "budget_share" in table else {}))
        buffer = io.BytesIO()
        if kind.file == "csv":
            table.to_csv(buffer, index=False)
        else:
            table.to_parquet(buffer, index=False)
        _put(folder / f"{kind.name}.{kind.file}", buffer.getvalue())
        plots.write(kind.figures(rows), folder)
        for name, page in kind.pages(rows).items():
            _put(folder / name, page.encode())
    rest = {key: value for key, value in document.items() if key != "analyses"}
    _put(folder / "analyses.json", (json.dumps(rest, indent=1, allow_nan=False) + "\n").encode())
    return folder


def _put(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def show_result(result: Result) -> None:
    """Print the tables of one task, loss and attention: rows without a budget first, then by budget and loss ratio."""
    first = result.rows[0]
    count = f"{first['traces']} answers, {first['tokens']} tokens, interval {first['interval']}"
    print(f"{terminal.clean(first['task'])}: {count}; loss of the full cache {first['loss_full']:.3g} nats per token\n")
    for columns in (LOSS, ATTENTION):
        names = [name for name, _, _ in columns]
        table = terminal.grid("method", "budget", *names, right=("budget", *names))
        for row in result.rows:
            size = row["budget"] or (label(row["budget_share"]) if row["budget_share"] else "-")
            mark = "" if row["decode_bounded"] or size == "-" else " *"
            table.add_row(row["method"] + mark, str(size), *(shown(row[column]) for _, column, shown in columns))
        terminal.console().print(table)
        print()


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0


Shown = tuple[str, str, Callable[[float | None], str]]  # header, column, format
LOSS: tuple[Shown, ...] = (
    ("loss +", "loss_increase", _short),
    ("low", "loss_increase_low", _short),
    ("high", "loss_increase_high", _short),
    ("gap closed", "gap_closed", partial(_fixed, digits=2)),
    ("loss ratio", "loss_ratio", _short),
    ("error", "loss_ratio_se", _short),
)
ATTENTION: tuple[Shown, ...] = (
    ("KL", "kl", _short),
    ("top-1", "top1", partial(_fixed, digits=3)),
    *((name.replace("_", " "), name, partial(_fixed, digits=3)) for name in ("cosine", "mass_lost", "overlap")),
    ("entries", "entries_mean", partial(_fixed, digits=1)),
)


def show_analysis(kind: type[Analysis], rows: Sequence[Row]) -> None:
    """Print the short table of an analysis."""
    head, lines = kind.table(rows)
    terminal.console().print(f"{kind.name}: {kind.about}\n")
    table = terminal.grid(*head, right=tuple(head[1:]))
    for line in lines:
        table.add_row(*map(terminal.clean, line))
    terminal.console().print(table)
    print()
