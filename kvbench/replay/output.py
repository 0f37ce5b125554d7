"""Prints a replay, and writes its folder: tables, plots and one JSON document with everything needed to repeat it.

A comparison: replay.csv (a row per task, method and budget), traces.parquet (these rows split by trace), heads.parquet
(split by query head), replay.json. Analyses: rows and picture of each (overlap.csv, overlap.svg, ...), analyses.json.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.console import terminal
from kvbench.eviction.budget import label
from kvbench.replay.analyses.api import Analysis, Row
from kvbench.replay.batches import Result
from kvbench.store import check_out
from kvbench.store.files import replacing

LEGEND = """\
loss +: what eviction adds, in nats a token; low, high: over tokens of which the full cache is sure, and over others.
Where its own loss is next to nothing ratios are huge: read loss +. gap closed: 0 is random, 1 is golden, the oracle.
*: evicts the prompt only, and so holds more entries. docs/replay.md explains every column.
"""


def write(out: str, results: Sequence[Result], document: Mapping[str, Any]) -> Path:
    """Write a comparison to the folder `out`, replacing earlier files; return the folder.

    Raises SetupError, UserError when the folder cannot be written.
    """
    folder = check_out(out)
    for file, name in (("replay.csv", "rows"), ("traces.parquet", "traces"), ("heads.parquet", "heads")):
        _put_table(folder / file, [row for result in results for row in getattr(result, name)], ["budget"])
    _put_document(folder / "replay.json", document)
    return folder


def write_analyses(out: str, found: Mapping[type[Analysis], Sequence[Row]], document: Mapping[str, Any]) -> Path:
    """Write the rows and pictures of every analysis to the folder `out`, replacing earlier files. Raises as `write`."""
    folder = check_out(out)
    for kind, rows in found.items():
        _put_table(folder / f"{kind.name}.{kind.file}", rows, ["budget", "layer", "head"])
        for name, picture in kind.pictures(rows).items():
            _put(folder / name, picture.encode())
    _put_document(folder / "analyses.json", {key: value for key, value in document.items() if key != "analyses"})
    return folder


def _put_table(path: Path, rows: Sequence[Row], whole: Sequence[str]) -> None:
    """Write rows as CSV or Parquet, by the path's suffix. whole: integer columns, which may lack values."""
    import pandas as pd

    table, buffer = pd.DataFrame(list(rows)), io.BytesIO()
    kinds = {**dict.fromkeys(whole, "Int64"), "budget_share": "Float64"}
    table = table.astype({name: kind for name, kind in kinds.items() if name in table})
    (table.to_csv if path.suffix == ".csv" else table.to_parquet)(buffer, index=False)
    _put(path, buffer.getvalue())


def _put_document(path: Path, document: Mapping[str, Any]) -> None:
    _put(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def _put(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def show_result(result: Result) -> None:
    """Print the table of one task: rows without a budget first, then by budget and loss ratio."""
    plus_minus = "+-" if terminal.ascii_only() else "±"
    first = result.rows[0]
    count = f"{first['traces']} answers, {first['tokens']} tokens, interval {first['interval']}"
    print(f"{terminal.clean(first['task'])}: {count}; loss of the full cache {first['loss_full']:.3g} nats a token\n")
    numbers = (
        "budget",
        "loss ratio",
        "loss +",
        "low",
        "high",
        "KL",
        "top-1",
        "cosine",
        "mass lost",
        "overlap",
        "gap closed",
    )
    table = terminal.grid("method", *numbers, "entries", right=(*numbers, "entries"))
    for row in result.rows:
        size = row["budget"] or (label(row["budget_share"]) if row["budget_share"] else "-")
        mark = "" if row["decode_bounded"] or size == "-" else " *"
        ratio = f"{_short(row['loss_ratio'])} {plus_minus} {_short(row['loss_ratio_se'])}"
        gap = _fixed(row["gap_closed"], 2)
        table.add_row(
            row["method"] + mark,
            str(size),
            ratio,
            *(_short(row[name]) for name in ("loss_increase", "loss_increase_low", "loss_increase_high", "kl")),
            *(_fixed(row[name], 3) for name in ("top1", "cosine", "mass_lost", "overlap")),
            gap,
            _fixed(row["entries_mean"], 1),
        )
    terminal.console().print(table)
    print()


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0


def show_analysis(kind: type[Analysis], rows: Sequence[Row]) -> None:
    """Print the short table of an analysis."""
    head, lines = kind.table(rows)
    print(f"{kind.name}: {kind.about}\n")
    table = terminal.grid(*head, right=tuple(head[1:]))
    for line in lines:
        table.add_row(*map(terminal.clean, line))
    terminal.console().print(table)
    print()
