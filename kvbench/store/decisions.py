"""Writes and reads decisions.parquet: which tokens a method kept at each eviction. The file covers a few of a run's
answers; it has a line per answer, layer and KV head.

`kvbench record` writes the file beside the run's tables, and `report --html` shows it. An evicted entry never comes
back, so a line needs only one integer per token: the number of the eviction that dropped the token. A run is complete
without this file.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, quote
from kvbench.store import parquet
from kvbench.store.files import open_plain, reason, replacing
from kvbench.store.schema import FORMAT, FORMAT_KEY
from kvbench.store.strict_json import parse

NAME = "decisions.parquet"
MOST = 256 << 20  # bytes of all lists as text; limited because a small file can repeat a long text in every line
_LISTS = ("tokens", "seen", "dropped")
_ROW = 4 << 20  # most bytes of a line, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What one KV head of one layer kept while the model read one prompt and its answer.

    Attributes:
        row_key: the key of the answer's row in rows.parquet.
        prompt: number of tokens of the prompt; all later tokens belong to the answer.
        tokens: the text of every token of prompt and answer.
        seen: for each eviction the number of tokens that had been read before it.
        dropped: for each token the number of the eviction that dropped it, counted from 1; 0: it was kept to the end.
    """

    row_key: str
    task: str
    doc_id: str
    layer: int
    head: int
    prompt: int
    tokens: list[str]
    seen: list[int]
    dropped: list[int]


def write(folder: Path, rows: Sequence[Decisions]) -> Path:
    """Write decisions.parquet into a run's folder; an older file is replaced. Return its path. Raises UserError if the
    lists have more than MOST bytes as JSON text, SetupError if the file cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: [json.dumps(v) if name in _LISTS else v for v in (getattr(row, name) for row in rows)]
        for name in Decisions.__slots__
    }
    if (size := sum(len(text) for name in _LISTS for text in columns[name])) > MOST:
        raise UserError(
            f"the recorded decisions take {size:,} bytes; the limit is {MOST:,}. Record fewer questions (--limit) or "
            "tasks (--task)."
        )
    table = pa.Table.from_pydict(columns, schema=_schema())
    try:
        with replacing(folder / NAME) as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    except OSError as error:
        raise SetupError(
            f"cannot write {quote(folder / NAME)} ({reason(error)}). Make the folder writable and free some space."
        ) from None
    return folder / NAME


def read(folder: Path) -> Iterator[Decisions]:
    """Yield the decisions of a run; nothing if the run has no decisions.parquet. Raises SetupError for a damaged file,
    and UserError for a file that kvbench did not write or that has another format.

    If successive lines have equal lists, their `Decisions` share one list object, to save memory.
    """
    try:
        file = os.fdopen(open_plain(folder / NAME), "rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetupError(f"cannot read {quote(folder / NAME)} ({reason(error)}).") from None
    with file:
        try:
            table = parquet.decode(NAME, file, _schema(), _schema().names, _ROW)
            _check_size(table)
            parsed = functools.lru_cache(2 * len(_LISTS))(parse)  # all lines of an answer have the same tokens
            for batch in table.to_batches(max_chunksize=1):
                yield from (_row(row, parsed) for row in batch.to_pylist())
        except ValueError as error:
            raise SetupError(
                f"{quote(folder / NAME)} is damaged ({error}). Remove it; 'kvbench record' makes it again."
            ) from None


def _check_size(table: Any) -> None:
    """Raise ValueError if the lists of the whole file take more than MOST bytes. A list that the file stores once for
    several lines counts once per line."""
    import pyarrow.compute as pc

    size = 0
    for chunk in (chunk for name in _LISTS for chunk in table.column(name).chunks):
        size += pc.sum(pc.take(pc.binary_length(chunk.dictionary), chunk.indices).cast("int64")).as_py() or 0
    if size > MOST:
        raise ValueError(f"its lists take {size:,} bytes, more than the limit of {MOST:,}")


def _schema() -> Any:
    import pyarrow as pa

    name, number = pa.dictionary(pa.int32(), pa.string()), pa.int32()
    kinds = {"row_key": name, "task": name, "doc_id": name, "layer": number, "head": number, "prompt": number}
    kinds |= dict.fromkeys(_LISTS, name)
    return pa.schema(kinds, metadata={FORMAT_KEY: str(FORMAT)})


def _row(row: dict[str, Any], parsed: Callable[[str], Any]) -> Decisions:
    """Return the decisions in one line of the file. parsed: a function that parses a list stored as JSON. Raises
    ValueError if the line's lists contradict each other."""
    lists = {name: parsed(row[name]) for name in _LISTS}
    tokens, seen, dropped = lists.values()
    if not (_all(tokens, str) and _all(seen, int) and _all(dropped, int) and len(tokens) == len(dropped)):
        raise ValueError("the lists of a line have wrong types or different lengths")
    if seen != sorted(set(seen)) or not all(0 <= number <= len(seen) for number in dropped):
        raise ValueError("the evictions of a line are out of order, or the line names an eviction that did not happen")
    return Decisions(**row | lists)


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
