"""Converts rows to Arrow tables and pandas frames.

Arrow tables keep repeated names dictionary-encoded. pandas frames have plain strings, nullable integers and booleans,
and NaN for missing floats. Rows from the journal and the same rows from a parquet table therefore give equal frames.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvbench.store.schema import COLUMNS, FORMAT, FORMAT_KEY, NAMES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TEXT_NAMES = ("row_key", "prompt", "output", "turns")  # turns: a JSON list of answers, null for a single turn


def rows_schema(names: Collection[str] = NAMES) -> pa.Schema:
    """Return the schema of rows.parquet, limited to the columns in `names`. The metadata of each field states its
    unit and its meaning."""
    import pyarrow as pa

    types = {
        "name": pa.dictionary(pa.int32(), pa.string()),
        "text": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    fields = [
        pa.field(c.name, types[c.kind], metadata={"unit": c.unit, "meaning": c.meaning})
        for c in COLUMNS
        if c.name in names
    ]
    return pa.schema(fields, metadata={FORMAT_KEY: str(FORMAT)})


def texts_schema() -> pa.Schema:
    """Return the schema of texts.parquet."""
    import pyarrow as pa

    return pa.schema([pa.field(n, pa.string()) for n in TEXT_NAMES], metadata={FORMAT_KEY: str(FORMAT)})


def to_table(rows: Sequence[Mapping[str, Any]], names: Collection[str] = NAMES) -> pa.Table:
    """Return rows as an Arrow table. rows: as `schema.check_row` returns them; columns that a row lacks become null."""
    import pyarrow as pa

    schema = rows_schema(names)
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_timestamp(field.type):
            values = [None if v is None else datetime.fromisoformat(v) for v in values]
        arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return an Arrow table of rows as a pandas frame with plain, nullable types."""
    import pandas as pd
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    types = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=types.get)
    return frame


def columns_as_lists(frame: pd.DataFrame, names: Sequence[str] = NAMES) -> dict[str, list[Any]]:
    """Return columns of a frame as lists of Python values. A missing value becomes None, and a missing column becomes a
    list of None. Frames with equal values give equal lists, even if the types of their columns differ."""
    kinds = {c.name: c.kind for c in COLUMNS}
    dtypes = {"int32": "Int64", "int64": "Int64", "float64": "Float64", "bool": "boolean"}
    lists: dict[str, list[Any]] = {}
    for name in names:
        if name not in frame:
            lists[name] = [None] * len(frame)
            continue
        series = frame[name].astype(dtypes.get(kinds[name], "object")).astype("object")
        lists[name] = series.where(series.notna(), None).tolist()
    return lists
