"""The tables of two finished runs, compared bit by bit and in their order, apart from columns that state time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Everything else must be equal: scores, tokens, hashes, entries, bytes, versions, the order of the rows.
TIMING = (
    *("created", "prefill_seconds", "decode_seconds", "evict_seconds"),
    *("tokens_per_second", "roofline_share", "machine_load"),
)


def differences(run: Path, other: Path, *, apart_from: Collection[str] = TIMING) -> list[str]:
    """What differs: ``rows.parquet: score``, ``texts.parquet: output``. Nothing when the tables are bit-equal."""
    found = []
    for name in ("rows.parquet", "texts.parquet"):
        one, two = (pq.read_table(folder / name, page_checksum_verification=True) for folder in (run, other))
        if one.schema != two.schema or len(one) != len(two):
            found.append(f"{name}: {len(one)} and {len(two)} rows, or other columns")
            continue
        columns = [c for c in one.column_names if c not in apart_from]
        found += [f"{name}: {c}" for c in columns if _bits(one.column(c)) != _bits(two.column(c))]
    return found


def _bits(column: pa.ChunkedArray) -> list[Any]:
    """Values that are equal only when their bits are: floats by their exact hexadecimal form."""
    return [value.hex() if isinstance(value, float) else value for value in column.to_pylist()]
