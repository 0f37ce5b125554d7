"""Reads runs and tables, for reports and comparisons. Takes no lock and never writes.

`read_run` reads one consistent state of a run: from its sealed table if the table has all rows, otherwise from the
journal, which may still be growing. `read_columns` reads a rows.parquet from any folder. A damaged table raises an
error instead of giving wrong numbers: a sealed table must have the hash that seal.json states, and every page must
match its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import SetupError, UserError, bare, counted, quote
from kvbench.store import manifest, parquet, tables
from kvbench.store.again import repair_command
from kvbench.store.cells import CELL, SAVED, UnfinishedCell, counts, rows_of_cells, unfinished_cells
from kvbench.store.files import cure, open_plain, reason
from kvbench.store.frames import TEXT_NAMES, columns_as_lists, rows_schema, texts_schema, to_frame, to_table
from kvbench.store.recovery import JournalContent, TextReader, read_journal
from kvbench.store.schema import DETERMINISTIC, FINAL, NAMES, REQUIRED, sort_key
from kvbench.store.strict_json import parse

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ROW, _TEXT = 64 << 10, 16 << 20  # upper limits, in bytes, of a row and of a prompt with its answers


@dataclass(frozen=True)
class Snapshot:
    """The rows of a run at one moment, and how many there are.

    `table`: the rows. `saved`: the number of rows with status "ok" or "unscored". `failed`: the number of all other
    rows. `final`: the number of failed rows that no further attempt can answer. `planned`: the number of rows that the
    run will have; None: unknown. `sealed`: whether the rows come from the run's sealed table instead of its journal.
    `notices`: lines on dropped records of the journal. `unfinished_cells`: of an unfinished run, the planned cells
    that lack rows, by `cell_hash`; None: unknown.
    """

    table: pa.Table
    saved: int
    failed: int
    final: int
    planned: int | None
    sealed: bool
    notices: tuple[str, ...]
    unfinished_cells: Mapping[str, UnfinishedCell] | None = None

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table as a pandas frame."""
        return to_frame(self.table)

    @property
    def unfinished(self) -> bool:
        """Whether some planned rows are not saved yet (see `saved`) and a further attempt may save them; False if the
        planned number is unknown."""
        return self.planned is not None and self.saved + self.final < self.planned

    @property
    def progress(self) -> str:
        """The progress as text: "412 of 960 rows", or "412 rows" if the planned number is unknown."""
        saved = "" if self.planned is None else f"{self.saved} of "
        return saved + counted(self.saved if self.planned is None else self.planned, "row")


def read_run(run_dir: str | Path, columns: Collection[str] = NAMES) -> Snapshot:
    """Read the rows of a run, finished or not. `columns`: the columns to read, which must include `status`."""
    path = Path(run_dir)
    info = manifest.read(path)
    notices: list[str] = []
    table = _sealed(path, tables.ROWS, rows_schema(columns))
    sealed = table is not None
    if table is None:
        state = read_journal(path)
        notices = state.notices
        table = _from_journal(path, state, columns)
    statuses = {c["values"]: c["counts"] for c in table.column("status").cast("string").value_counts().to_pylist()}
    saved, final = (sum(statuses.get(status, 0) for status in some) for some in (SAVED, FINAL))
    known = {*CELL} <= {*table.column_names}
    planned = _planned(info, table if known else None)
    unfinished = known and planned is not None and saved + final < planned
    cells = unfinished_cells(info["environment"], table) if unfinished else None
    return Snapshot(table, saved, len(table) - saved, final, planned, sealed, tuple(notices), cells)


def _planned(info: Mapping[str, Any], table: pa.Table | None) -> int | None:
    """Return how many rows the run will have; None if this is unknown.

    The result is the larger of two numbers: the number in the run's record, and the sum over the planned cells. If the
    record does not state the rows of a cell, the cell counts as many rows as the largest cell of the same task has now,
    because in a complete run all cells of a task have the same number of rows.

    In three cases the result is the number in the record: the run is a shard, whose cells differ in their number of
    rows; the record lists no planned cells; the record states no rows of cells and `table` is None.
    """
    stated: int | None = info.get("planned")
    if "shard" in info["environment"]:
        return stated
    if (cells := rows_of_cells(info["environment"])) is not None:
        return max(stated or 0, sum(cell["rows"] for cell in cells))
    tasks = info["environment"].get("tasks", {})
    plans = Counter(
        max((task for task in tasks if plan["cell"].startswith(f"{task} ")), key=len, default="")
        for plan in info["environment"].get("plans") or ()
    )
    if not plans or table is None:
        return stated
    most: dict[str, int] = {}
    for task, statuses in counts(table).values():
        most[task] = max(statuses.total(), most.get(task, 0))
    return max(stated or 0, sum(count * most.get(task, 0) for task, count in plans.items()))


def _from_journal(run_dir: Path, state: JournalContent, columns: Collection[str]) -> pa.Table:
    import pyarrow as pa

    try:
        return to_table(sorted((e.row for e in state.entries.values()), key=sort_key), columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SetupError(
            f"the journal of {quote(run_dir)} holds a row that kvbench did not write ({bare(error)}). Put back a copy "
            "of the journal."
        ) from error


def read_rows(run_dir: str | Path) -> pd.DataFrame:
    """Return the rows of a run as a frame, finished or not (see `read_run`)."""
    return read_run(run_dir).rows


def read_texts(run_dir: str | Path, keys: Collection[str] | None = None) -> pd.DataFrame:
    """Return row_key, prompt, output and turns of a run's rows, in the order of `read_rows`. keys: return only the rows
    with these keys; the other rows' texts are then never in memory together."""
    import pyarrow as pa

    path = Path(run_dir)
    manifest.read(path)
    table = _sealed(path, tables.TEXTS, texts_schema(), keys)
    if table is None:
        every = read_journal(path).entries.values()
        entries = [e for e in sorted(every, key=lambda e: sort_key(e.row)) if keys is None or e.row["row_key"] in keys]
        with TextReader(path) as reader:
            records = [dict(zip(TEXT_NAMES, (e.row["row_key"], *reader.read(e)), strict=True)) for e in entries]
        table = pa.Table.from_pylist(records, schema=texts_schema())
    return to_frame(table)


def parse_turns(text: Any) -> list[str] | None:
    """Return the answers of all turns from a value of the column `turns` of `read_texts`; None unless the value is a
    JSON list of one or more texts."""
    try:
        turns = parse(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return turns if turns and isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else None


def read_columns(path: str | Path, columns: Collection[str] = NAMES) -> pa.Table:
    """Read columns of one rows.parquet. Raises SetupError if the file is damaged, or is a link in a run's folder.
    Raises UserError if the file cannot be opened, kvbench did not write it, or it has another format."""
    file = Path(path)
    in_a_run = (file.parent / manifest.NAME).is_file()  # a link in a run's folder is not followed
    return _parse(file if in_a_run else file.resolve(), rows_schema(columns))


def table_hash(rows: pd.DataFrame) -> str:
    """Return a SHA-256 over the columns of `rows` on which two runs of one configuration must agree. The hash does not
    depend on the order of the rows or on the column types of the frame.

    Two runs of one configuration with the same outputs, scores and cache sizes have the same hash.
    """
    columns = columns_as_lists(rows, DETERMINISTIC)
    values = zip(*columns.values(), strict=True)
    records = sorted((dict(zip(columns, v, strict=True)) for v in values), key=sort_key)
    digest = hashlib.sha256(json.dumps(DETERMINISTIC).encode())
    for record in records:
        digest.update(json.dumps(list(record.values())).encode())
    return digest.hexdigest()


def _sealed(run_dir: Path, name: str, schema: pa.Schema, keys: Collection[str] | None = None) -> pa.Table | None:
    """Return a table of a run after checking its hash in seal.json. None if the run has no seal, or if its journal has
    rows that the table lacks; the caller must then read the journal. keys: return only the rows with these keys."""
    seal = tables.read_seal(run_dir)
    while seal is not None and tables.is_current(run_dir, seal):
        path = run_dir / name
        try:
            intact = tables.sha256(path) == seal["sha256"][name]
        except OSError as error:
            raise SetupError(f"cannot read {quote(path)} ({reason(error)}). {cure(error, _remedy(path))}") from error
        if intact:
            return _parse(path, schema, keys)
        again = tables.read_seal(run_dir)
        if again == seal:
            raise _damaged(path, "it is not the file that seal.json describes")
        seal = again  # the run was sealed anew between the two readings of seal.json
    if seal is not None:
        tables.check_journal_complete(run_dir)
    return None


def _parse(path: Path, schema: pa.Schema, keys: Collection[str] | None = None) -> pa.Table:
    required = [name for name in REQUIRED if name in schema.names]
    try:
        file = os.fdopen(open_plain(path), "rb")
    except OSError as error:
        raise UserError(f"cannot read {quote(path)} ({reason(error)}). Check its path and permissions.") from error
    with file:
        if file.read(4) not in (b"PAR1", b""):
            raise UserError(f"{bare(path.name)} has no kvbench metadata. Name a file that kvbench wrote.")
        try:
            row_bytes = _TEXT if "prompt" in schema.names else _ROW
            return parquet.decode(path.name, file, schema, required, row_bytes, keys)
        except parquet.Damaged as error:
            raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> SetupError:
    with open(open_plain(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        cut = file.read() != b"PAR1"
    return SetupError(f"{bare(path.name)} is damaged ({'no end mark' if cut else why}). {_remedy(path)}")


def _remedy(path: Path) -> str:
    if (path.parent / manifest.NAME).is_file():
        return f"'{repair_command(path.parent)}' rebuilds it from the journal."
    return "Copy it again from where it came."
