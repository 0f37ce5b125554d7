"""Reads kvbench's tables from parquet files of any origin.

A file that `decode` cannot trust is refused with a message of one line. Columns in `ADDED` may be missing, because
older tables lack them; they read as null.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from kvbench.errors import UserError, bare
from kvbench.store import manifest
from kvbench.store.schema import ADDED, FORMAT_KEY

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BYTES = 16 << 20  # unpacked bytes that any table may have, beside `row_bytes` per row
_AT_ONCE = 256  # rows in memory at a time if only some are wanted


class Damaged(ValueError):
    """The file is a damaged table. The exception's message says why."""


def decode(
    name: str,
    file: BinaryIO,
    schema: pa.Schema,
    required: Sequence[str],
    row_bytes: int,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Return the columns of `schema` from a file, cast to the schema's types, with the file's metadata.

    name: the file's name in messages. required: columns that must have a value in every row. row_bytes: the largest
    allowed mean size of an unpacked row. keys: return only the rows with these keys (column row_key). Raises UserError
    if kvbench did not write the file, or wrote it in another format. Raises Damaged for every other fault of the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"page_checksum_verification": True, "pre_buffer": False}
    try:
        with pq.ParquetFile(file, **options) as parquet:
            metadata = parquet.schema_arrow.metadata or {}
            if FORMAT_KEY.encode() not in metadata:
                raise UserError(f"{bare(name)} has no kvbench metadata. Name a file that kvbench wrote.")
            manifest.check_format(name, int(metadata[FORMAT_KEY.encode()]))
            _check_columns(parquet.schema_arrow, schema)
            _check_size(parquet.metadata, schema.names, os.fstat(file.fileno()).st_size, row_bytes)
            # In dictionary encoding, Arrow keeps a repeated text only once: a small file stays small in memory.
            stored = parquet.schema_arrow.names
            texts = [field.name for field in schema if field.name in stored and pa.types.is_dictionary(field.type)]
        with pq.ParquetFile(file, metadata=parquet.metadata, read_dictionary=texts, **options) as parquet:
            table = parquet.read(columns=schema.names) if keys is None else _with_keys(parquet, schema.names, keys)
            table.validate(full=True)
        for name in set(schema.names) - set(table.column_names):
            table = table.append_column(name, pa.nulls(len(table)))
        table = table.select(schema.names).cast(schema.with_metadata(metadata))
    except Damaged:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise Damaged("it cannot be decoded") from error
    for column in required:
        if table.column(column).null_count:
            raise Damaged(f"a row has no value in column {column}")
    return table


def _with_keys(parquet: pq.ParquetFile, names: Sequence[str], keys: Collection[str]) -> pa.Table:
    """Return the rows with these keys. Only some rows of the file are in memory at a time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.array(sorted(keys), pa.string())
    chosen = []
    for batch in parquet.iter_batches(_AT_ONCE, columns=names):
        batch.validate(full=True)  # before its texts are compared
        chosen.append(batch.filter(pc.is_in(batch.column("row_key").cast(pa.string()), value_set=wanted)))
    return pa.Table.from_batches(chosen, pa.schema([field for field in parquet.schema_arrow if field.name in names]))


def _check_columns(stored: pa.Schema, schema: pa.Schema) -> None:
    """Raise Damaged if a column of `schema` is duplicated, nested, or missing and not in `ADDED`."""
    import pyarrow as pa

    for name in schema.names:
        if name not in stored.names:
            if name in ADDED:
                continue
            raise Damaged(f"it has no column {name}")
        if len(stored.get_all_field_indices(name)) > 1:
            raise Damaged(f"it has several columns named {name}")
        if pa.types.is_nested(stored.field(name).type):
            raise Damaged(f"column {name} has the nested type {bare(stored.field(name).type)}")


def _check_size(footer: pq.FileMetaData, names: Sequence[str], size: int, row_bytes: int) -> None:
    """Raise Damaged if the footer, checked before any page is read, claims more than the file can hold. size: the
    file's size in bytes.

    The limit for rows is one per byte of the file: no two rows of a table are equal, so every row takes space. The
    limit for the unpacked bytes of the columns `names` is `_BYTES` plus `row_bytes` per row.
    """
    if footer.num_rows > size:
        raise Damaged(f"its footer claims {footer.num_rows} rows in {size} bytes")
    claimed = 0
    for group in map(footer.row_group, range(footer.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        claimed += sum(c.total_uncompressed_size for c in columns if c.path_in_schema in names)
    most = _BYTES + row_bytes * footer.num_rows
    if claimed > most:
        raise Damaged(f"its footer claims {claimed:,} unpacked bytes, more than the limit of {most:,} for its rows")
