"""Prints the results of a replay, and writes them to a folder with a JSON document that says how to repeat the replay.

docs/replay.md and docs/analyses.md say which files there are.
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
loss +: the loss that eviction adds, in nats per token. low: loss + of the 80% of tokens that the
full cache predicts with the lowest entropy; high: of the others. gap closed: 0 is random, 1 is the
oracle golden. loss ratio, with its standard error: the loss divided by that of the full cache; huge
where the full cache has almost no loss. *: the method evicts the prompt only, so it holds more
entries. docs/replay.md explains every column.
"""


def write(out: str, results: Sequence[Result], document: Mapping[str, Any]) -> Path:
    """Write the results of a comparison to the folder `out`, replacing earlier files; return the folder. Raises
    SetupError or UserError if the folder cannot be written."""
    folder = check_out(out)
    for file, name in (("replay.csv", "rows"), ("traces.parquet", "traces"), ("heads.parquet", "heads")):
        _put_table(folder / file, [row for result in results for row in getattr(result, name)], ["budget"])
    _put_document(folder / "replay.json", document)
    return folder


def write_analyses(out: str, found: Mapping[type[Analysis], Sequence[Row]], document: Mapping[str, Any]) -> Path:
    """Write the tables, pages and figures of every analysis to the folder `out`, replacing earlier files; return the
    folder. Raises SetupError or UserError if the folder cannot be written."""
    folder = check_out(out)
    for kind, rows in found.items():
        _put_table(folder / f"{kind.name}.{kind.file}", rows, ["budget", "layer", "head"])
        for name, page in kind.pages(rows).items():
            _put(folder / name, page.encode())
    plots.write([figure for kind, rows in found.items() for figure in kind.figures(rows)], folder)
    _put_document(folder / "analyses.json", {key: value for key, value in document.items() if key != "analyses"})
    return folder


def _put_table(path: Path, rows: Sequence[Row], whole: Sequence[str]) -> None:
    """Write the rows of a table to a file, as CSV if the path ends in .csv, otherwise as Parquet. whole: names of the
    columns that have whole numbers, perhaps with missing values."""
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
    """Print two tables for one task, of loss and of attention, with a line per method and budget. Methods without a
    budget come first; the others are sorted by budget and loss ratio."""
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


def show_published(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the replay's figures beside the numbers that papers print for them (`kvbench.replay.published`)."""
    names = ("task", "method", "budget", "interval", "figure", "here", "error", "published", "difference", "in")
    table = terminal.grid(*names, right=("budget", "interval", "here", "error", "published", "difference"))
    for line in lines:
        numbers = (_fixed(line[name], 4) for name in ("here", "here_se", "published", "difference"))
        which = (terminal.clean(str(line[name])) for name in ("task", "method", "budget", "interval", "figure"))
        table.add_row(*which, *numbers, line["source"].rpartition(", ")[2])
    print("Published figures beside ours:\n")
    terminal.console().print(table)
    papers = ", ".join(dict.fromkeys(line["source"].rpartition(", ")[0] for line in lines))
    print(f"From {papers}: measured with other code, on questions that are not named; no error bars.\n")


def show_analysis(kind: type[Analysis], rows: Sequence[Row]) -> None:
    """Print the results of an analysis as a short table."""
    head, lines = kind.table(rows)
    terminal.console().print(f"{kind.name}: {kind.about}\n")
    table = terminal.grid(*head, right=tuple(head[1:]))
    for line in lines:
        table.add_row(*map(terminal.clean, line))
    terminal.console().print(table)
    print()
