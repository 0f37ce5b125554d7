"""Reads runs and tables, for reports and comparisons. Takes no lock and never writes.

`read_run` gives one consistent state of a run: its sealed table when that has all rows, else the journal, which may
still be growing. `read_table` reads one rows.parquet wherever it lies. Damage is an error, never a wrong number: a
sealed table must have the hash in seal.json, and every page its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvbench.errors import SetupError, UserError, show
from kvbench.store import manifest, tables
from kvbench.store.again import repair_command
from kvbench.store.files import bare, open_plain, reason
from kvbench.store.frames import TEXT_NAMES, columns_as_lists, texts_schema, to_frame, to_table, upgrade
from kvbench.store.replay import TextReader, replay
from kvbench.store.schema import DETERMINISTIC, FORMAT, FORMAT_KEY, NAMES, OK, sort_key

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. `saved` rows are ok or wait for a score, the others `failed`; `planned` None: unknown."""

    rows: pd.DataFrame
    saved: int
    failed: int
    planned: int | None
    sealed: bool
    notices: tuple[str, ...]

    @property
    def progress(self) -> str:
        """ "412 of 960 rows"."""
        return f"{self.saved} rows" if self.planned is None else f"{self.saved} of {self.planned} rows"


def read_run(run_dir: str | Path) -> Snapshot:
    """The rows of a run, finished or not."""
    path = Path(run_dir)
    planned = manifest.read(path).get("planned")
    notices: list[str] = []
    table = _sealed(path, tables.ROWS)
    sealed = table is not None
    if table is None:
        state = replay(path)
        notices = state.notices
        table = to_table(sorted((e.row for e in state.entries.values()), key=sort_key))
    elif (written := _format(table.schema)) < FORMAT and set(NAMES) - set(table.column_names):
        notices = [f"{tables.ROWS} has the older format {written}; columns that it lacks are empty."]
    frame = to_frame(upgrade(table))
    saved = int(frame["status"].isin((OK, "unscored")).sum())
    return Snapshot(frame, saved, len(frame) - saved, planned, sealed, tuple(notices))


def read_rows(run_dir: str | Path) -> pd.DataFrame:
    """The rows of a run as a frame. See `read_run` for how complete it is."""
    return read_run(run_dir).rows


def read_texts(run_dir: str | Path) -> pd.DataFrame:
    """row_key, prompt and output of a run's rows, in the order of `read_rows`."""
    import pyarrow as pa

    path = Path(run_dir)
    manifest.read(path)
    table = _sealed(path, tables.TEXTS)
    if table is None:
        entries = sorted(replay(path).entries.values(), key=lambda e: sort_key(e.row))
        with TextReader(path) as reader:
            records = [dict(zip(TEXT_NAMES, (e.row["row_key"], *reader.read(e)), strict=True)) for e in entries]
        table = pa.Table.from_pylist(records, schema=texts_schema())
    return to_frame(table)


def read_table(path: str | Path) -> pd.DataFrame:
    """One rows.parquet as a frame. Columns that an older format lacks are null.

    Raises:
        UserError: there is none, it is not kvbench's, or it was made by a newer kvbench.
        SetupError: it is damaged.
    """
    file = Path(path)
    in_a_run = (file.parent / manifest.NAME).is_file()  # a link in a run's folder is not followed, a typed one is
    return to_frame(upgrade(_parse(file if in_a_run else file.resolve())))


def table_hash(rows: pd.DataFrame) -> str:
    """SHA-256 over the deterministic columns, free of row order and of the types that a reader chose.

    Equal for two runs of one configuration that gave the same outputs, scores and cache sizes, whatever they took in
    time.
    """
    columns = columns_as_lists(rows, DETERMINISTIC)
    values = zip(*columns.values(), strict=True)
    records = sorted((dict(zip(columns, v, strict=True)) for v in values), key=sort_key)
    digest = hashlib.sha256(json.dumps(DETERMINISTIC).encode())
    for record in records:
        digest.update(json.dumps(list(record.values())).encode())
    return digest.hexdigest()


def _sealed(run_dir: Path, name: str) -> pa.Table | None:
    """A table of a sealed run, checked against its seal; None when the journal has to be read."""
    seal = tables.read_seal(run_dir)
    while seal is not None and tables.is_current(run_dir, seal):
        path = run_dir / name
        try:
            intact = tables.sha256(path) == seal["sha256"][name]
        except OSError as error:
            raise SetupError(f"cannot read {show(path)} ({reason(error)}). {_remedy(path)}") from error
        if intact:
            return _parse(path)
        again = tables.read_seal(run_dir)
        if again == seal:
            raise _damaged(path, "it is not the file that seal.json describes")
        seal = again  # the run was sealed anew between our two reads
    if seal is not None:
        tables.check_journal_complete(run_dir)
    return None


def _parse(path: Path) -> pa.Table:
    try:
        file = os.fdopen(open_plain(path), "rb")
    except OSError as error:
        raise UserError(f"cannot read {show(path)} ({reason(error)}).") from error
    with file:
        head = file.read(4)
        if head not in (b"PAR1", b""):
            raise UserError(f"{bare(path.name)} has no kvbench metadata.")
        return _decode(path, file)


def _decode(path: Path, file: BinaryIO) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as table:
            metadata = table.schema_arrow.metadata or {}
            if FORMAT_KEY.encode() not in metadata:
                raise UserError(f"{bare(path.name)} has no kvbench metadata.")
            manifest.check_format(path.name, int(metadata[FORMAT_KEY.encode()]))
            return table.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, "it cannot be decoded") from error


def _format(schema: pa.Schema) -> int:
    return int(schema.metadata[FORMAT_KEY.encode()])


def _damaged(path: Path, why: str) -> SetupError:
    with open(open_plain(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4))
        cut = file.read() != b"PAR1"
    return SetupError(f"{bare(path.name)} is damaged ({'no end mark' if cut else why}). {_remedy(path)}")


def _remedy(path: Path) -> str:
    if (path.parent / manifest.NAME).is_file():
        return f"{repair_command(path.parent)} rebuilds it from the journal."
    return "Copy it again from where it came."
