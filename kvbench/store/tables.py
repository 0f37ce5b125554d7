"""Makes a run's tables from its journal: rows.parquet, texts.parquet and seal.json.

`seal` writes both new tables beside the old tables, reads them back, and only then replaces the old tables. Last it
writes seal.json, which lists the journal segments from which the tables were made. A kill at any moment leaves whole
tables; if seal.json is missing, readers use the journal, which is never deleted. The caller of `seal` must hold the
run's lock; `repair` takes the lock itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvbench.errors import NEW_RUN, SetupError, counted, quote
from kvbench.store import manifest
from kvbench.store.again import repair_command
from kvbench.store.files import (
    crash_point,
    cure,
    open_plain,
    read_plain,
    reason,
    remedy,
    remove_leftovers,
    replacing,
    sync_folder,
)
from kvbench.store.frames import TEXT_NAMES, rows_schema, texts_schema, to_frame, to_table
from kvbench.store.lock import RunLock
from kvbench.store.recovery import Entry, JournalContent, TextReader, read_journal, segments_on_disk
from kvbench.store.schema import COLUMNS, FORMAT, sort_key
from kvbench.store.strict_json import document

if TYPE_CHECKING:
    import pyarrow as pa

ROWS, TEXTS, SEAL = "rows.parquet", "texts.parquet", "seal.json"

_LARGEST_SEAL = 64 << 20  # most bytes of a seal.json; with thousands of segments it has some hundred kilobytes
_TEXTS_AT_ONCE = 256  # rows whose texts are in memory at a time; answers of reasoning models have tens of kilobytes
_NAMES = [c.name for c in COLUMNS if c.kind == "name"]
_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}


def seal(run_dir: Path, state: JournalContent) -> dict[str, Any]:
    """Make the tables of a run from its journal, and return the content of seal.json. state: the journal's content.
    Raises SetupError if the disk is full or broken. The journal then still has all rows, and no table is torn."""
    entries = sorted(state.entries.values(), key=lambda e: sort_key(e.row))
    try:
        with replacing(run_dir / ROWS) as rows, replacing(run_dir / TEXTS) as texts:
            count = write_rows(rows, to_table([e.row for e in entries]))
            content = _describe(state, count, _write_texts(texts, run_dir, entries))
            content["sha256"] = {ROWS: sha256(Path(rows.name)), TEXTS: sha256(Path(texts.name))}
            crash_point("tables verified")
            (run_dir / SEAL).unlink(missing_ok=True)  # from here on until the new seal, readers use the journal
            sync_folder(run_dir)
            crash_point("seal removed")
        with replacing(run_dir / SEAL) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        kept = f"The journal ({counted(len(state.done), 'row')}) is unchanged, and no table is damaged"
        raise SetupError(
            f"cannot write the tables in {quote(run_dir)} ({reason(error)}). {kept}; "
            f"{remedy(error)}, then run {repair_command(run_dir)}."
        ) from error
    return content


def repair(run_dir: str | Path, *, take_over: bool = False, say: Callable[[str], object] = str) -> dict[str, Any]:
    """Make the tables of a run again from its journal, and return the content of seal.json. say: receives warnings of
    one line. take_over: as in `RunLock.acquire`.

    Raises RunInUseError if another process holds the run's lock. Raises SetupError if the journal is gone or lacks a
    segment from which the present tables were made, or if the tables cannot be written.
    """
    path = Path(run_dir)
    name = manifest.read(path)["name"]
    lock = RunLock(path / "lock", name)
    for text in lock.acquire(take_over=take_over):
        say(text)
    try:
        check_journal_complete(path)
        remove_leftovers(path)
        content = read_journal(path)
        for text in content.notices:
            say(text)
        return seal(path, content)
    finally:
        lock.release()


def _remedy(run_dir: Path) -> str:
    again = repair_command(run_dir)
    return f"Put back a copy of it, or delete it and run {again}, which makes the tables from the journal."


def read_seal(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of seal.json, or None if the run has no such file. Raises SetupError if the file cannot be
    read or is not the seal of a run, UserError if it has another format."""
    path = run_dir / SEAL
    try:
        content = document(read_plain(path, _LARGEST_SEAL))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"cannot read {quote(path)} ({reason(error)}). {cure(error, _remedy(run_dir))}") from error
    except ValueError:
        raise SetupError(f"{quote(path)} is damaged. {_remedy(run_dir)}") from None
    if isinstance(content, dict) and isinstance(content.get("format"), int):
        manifest.check_format(SEAL, content["format"])
        if _is_seal(content):
            return content
    raise SetupError(f"{quote(path)} does not have the content of a run's seal.json. {_remedy(run_dir)}")


def _is_seal(content: dict[str, Any]) -> bool:
    """Return whether the content of a seal.json has the parts that readers use, with the right types."""
    segments, hashes = content.get("segments"), content.get("sha256")
    if not isinstance(segments, list) or not isinstance(hashes, dict):
        return False
    whole = all(isinstance(hashes.get(name), str) for name in (ROWS, TEXTS))
    return whole and all(isinstance(s, dict) and isinstance(s.get("name"), str) and "bytes" in s for s in segments)


def is_current(run_dir: Path, sealed: dict[str, Any]) -> bool:
    """Return whether the tables have all rows of the journal; True also if the run was copied without its journal.
    sealed: the content of seal.json."""
    made_from = {segment["name"]: segment["bytes"] for segment in sealed["segments"]}
    return all(made_from.get(name) == size for name, size in segments_on_disk(run_dir).items())


def check_journal_complete(run_dir: Path) -> None:
    """Raise SetupError if the journal lacks a segment that the tables were made from, because new tables would lack the
    segment's rows. Without seal.json, the journal must have a segment if there is a table."""
    sealed = read_seal(run_dir)
    here = segments_on_disk(run_dir)
    if sealed is None and not here and any((run_dir / name).exists() for name in (ROWS, TEXTS)):
        raise SetupError(
            f"{quote(run_dir)} has no journal to make its tables from. Put back a copy of its folder 'journal'."
        )
    gone = [segment["name"] for segment in sealed["segments"] if segment["name"] not in here] if sealed else []
    if gone:
        raise SetupError(
            f"the journal of {quote(run_dir)} lacks {quote(gone[0])}, from which its tables were made. "
            f"Put back a copy of this file, or {NEW_RUN}."
        )


def sha256(path: Path) -> str:
    with open(open_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_rows(file: BinaryIO, table: pa.Table) -> int:
    """Write rows.parquet, read it back, and return the number of rows. Raises OSError if the rows read differ from the
    rows written."""
    import pyarrow.parquet as pq

    pq.write_table(table, file, use_dictionary=_NAMES, **_OPTIONS)
    file.flush()
    crash_point("rows written")
    again = pq.read_table(file.name, page_checksum_verification=True)
    if again.schema != rows_schema() or not to_frame(again).equals(to_frame(table)):
        raise OSError(f"{ROWS} does not read back as written")
    return len(table)


def _write_texts(file: BinaryIO, run_dir: Path, entries: Sequence[Entry]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = texts_schema()
    with TextReader(run_dir) as reader, pq.ParquetWriter(file, schema, use_dictionary=False, **_OPTIONS) as writer:
        for start in range(0, len(entries), _TEXTS_AT_ONCE):
            chunk = [(e.row["row_key"], *reader.read(e)) for e in entries[start : start + _TEXTS_AT_ONCE]]
            arrays = [pa.array(values, pa.string()) for values in zip(*chunk, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    file.flush()
    crash_point("texts written")
    keys: list[str] = []
    with pq.ParquetFile(file.name, page_checksum_verification=True) as again:
        for batch in again.iter_batches(batch_size=_TEXTS_AT_ONCE, columns=list(TEXT_NAMES)):
            keys += batch.column(0).to_pylist()
    if keys != [e.row["row_key"] for e in entries]:
        raise OSError(f"{TEXTS} does not read back as written")
    return len(keys)


def _describe(state: JournalContent, rows: int, texts: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "ok": len(state.done),
        "texts": texts,
        "duplicates": state.duplicates,
        "nondeterministic_duplicates": state.nondeterministic_duplicates,
        "dropped_records": state.dropped,
        "segments": [{"name": name, "bytes": size} for name, size in state.segments.items()],
    }
