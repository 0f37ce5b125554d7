"""Holds the rows of a report as numpy columns. No row becomes a Python object.

    rows = Rows.of([("r1", table)])
    rows.number("score")            # floats, NaN where there is none; True and False are 1 and 0
    rows.text("method").names       # distinct texts; .codes says which of them a row has, -1: none
    rows.where(rows.number("score") == 1).scores("score_partial")

Several `Rows` share the same columns; each `Rows` holds only the positions of its rows. Choosing rows copies only
positions, so the rows of a cell cost time and memory for that cell alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.store.schema import COLUMNS

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

RUN = "run"  # column with the run's name, which `Rows.of` adds
KEY = "row_key"  # may have a million distinct texts, so only their codes are kept
KINDS = {column.name: column.kind for column in COLUMNS}


@dataclass(frozen=True, slots=True)
class Text:
    """A column of texts as codes. `codes`: for each row the index of its text in `names`, -1 for a missing text.
    `names`: the distinct texts."""

    codes: Ints
    names: list[str]

    @classmethod
    def of(cls, names: Sequence[str | None], codes: Ints) -> Text:
        """Make a column. Here `names` may hold a text several times, and None for a missing text."""
        import numpy as np

        distinct = list(dict.fromkeys(name for name in names if name is not None))
        if len(distinct) == len(names):
            return cls(codes, distinct)
        places = {name: place for place, name in enumerate(distinct)}
        moved = np.array([-1 if name is None else places[name] for name in names] + [-1])
        return cls(moved[codes], distinct)

    def renamed(self, rename: Callable[[str], str | None]) -> Text:
        return Text.of([rename(name) for name in self.names], self.codes)

    def filled(self, name: str) -> Text:
        """Return the column with `name` in place of missing texts."""
        import numpy as np

        codes = np.where(self.codes < 0, len(self.names), self.codes)
        return Text.of([*self.names, name], codes)

    def at(self, places: Ints) -> Text:
        return Text(self.codes[places], self.names)

    def present(self) -> list[int]:
        """Return the codes that some row has, in order of first appearance."""
        codes, first = distinct(self.codes[self.codes >= 0])
        return [int(codes[i]) for i in first.argsort()]

    def is_one_of(self, *names: str) -> Any:
        wanted = [code for code, name in enumerate(self.names) if name in names]
        if len(wanted) == 1:
            return self.codes == wanted[0]
        import numpy as np

        return np.isin(self.codes, wanted)

    def list(self) -> list[str | None]:
        return [None if code < 0 else self.names[code] for code in self.codes.tolist()]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as positions in shared columns. `columns`: by name, an array of floats or a `Text`. `places`: the positions
    of these rows."""

    columns: Mapping[str, Any]
    places: Ints

    @classmethod
    def of(cls, tables: list[tuple[str, pa.Table]]) -> Rows:
        """Make one `Rows` of the rows of all runs, one run after the other. `tables`: pairs of a run's name and its
        rows, with equal schemas; the list is emptied, to free memory."""
        import numpy as np
        import pyarrow as pa

        names, lengths = [name for name, _ in tables], [len(table) for _, table in tables]
        together = pa.concat_tables([table for _, table in tables])
        tables.clear()
        columns: dict[str, Any] = {}
        for name in together.column_names:
            columns[name] = _column(name, together.column(name))
            together = together.drop_columns([name])  # frees the column, so that a million rows fit into a gigabyte
        pa.default_memory_pool().release_unused()
        columns[RUN] = Text.of(names, np.repeat(np.arange(len(names)), lengths))
        return cls(columns, np.arange(sum(lengths)))

    def __len__(self) -> int:
        return len(self.places)

    def number(self, name: str) -> Floats:
        values: Floats = self.columns[name][self.places]
        return values

    def text(self, name: str) -> Text:
        column: Text = self.columns[name]
        return column.at(self.places)

    def where(self, chosen: Any) -> Rows:
        """Return the chosen rows. chosen: a mask over these rows, or positions among them."""
        return Rows(self.columns, self.places[chosen])

    def having(self, **columns: Any) -> Rows:
        """Return the same rows with the given columns added; a column of the same name is replaced."""
        total = len(self.columns[RUN].codes)
        added = {name: _spread(values, self.places, total) for name, values in columns.items()}
        return Rows({**self.columns, **added}, self.places)

    def without(self, name: str) -> Rows:
        return Rows({n: column for n, column in self.columns.items() if n != name}, self.places)

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a column, sorted and in the column's own type. Missing values are left out."""
        if isinstance(self.columns[name], Text):
            text = self.text(name)
            return sorted(text.names[code] for code in text.present())
        numbers = self.number(name)
        return [typed(name, x) for x in distinct(numbers[numbers == numbers])[0]]

    def firsts(self, name: str) -> list[tuple[int, Any]]:
        """Return (position, value) of the first row with each distinct value, in order of the rows. Missing values are
        left out."""
        if isinstance(self.columns[name], Text):
            column, values = self.text(name), self.text(name).codes
            unique, first = distinct(values)
            pairs = [(int(p), column.names[code]) for code, p in zip(unique.tolist(), first) if code >= 0]
        else:
            unique, first = distinct(self.number(name))
            pairs = [(int(p), typed(name, x)) for x, p in zip(unique, first) if x == x]
        return sorted(pairs, key=lambda pair: pair[0])

    def parts(self, *keys: Any) -> Iterator[tuple[tuple[int, ...], Rows]]:
        """Yield (key, rows) for each group of rows with equal keys, sorted by key. Each of `keys` gives every row a
        whole number from 0, or -1 to leave the row out."""
        import numpy as np

        sizes = [int(key.max(initial=0)) + 1 for key in keys]
        together = np.ravel_multi_index([np.maximum(key, 0) for key in keys], sizes)
        together = np.where(np.logical_and.reduce([key >= 0 for key in keys]), together, -1)
        order = np.argsort(together, kind="stable")
        keys_in_order = together[order]
        starts = np.flatnonzero(np.diff(keys_in_order, prepend=-2))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(keys_in_order)]):
            if keys_in_order[start] >= 0:
                key = tuple(int(k) for k in np.unravel_index(int(keys_in_order[start]), sizes))
                yield key, self.where(order[start:end])

    def scores(self, name: str) -> dict[str, list[float]]:
        """Return the numbers of a column for each question (doc_id), in order of appearance. Rows without a number are
        left out."""
        import numpy as np

        values, questions = self.number(name), self.text("doc_id")
        there = values == values
        values, codes = values[there], questions.codes[there]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-2))
        numbers = values[order].tolist()
        ends = [*starts[1:].tolist(), len(numbers)]
        first = order[starts]  # where each question appears
        scores = [(questions.names[codes[f]], numbers[s:e]) for f, s, e in zip(first, starts.tolist(), ends)]
        return {scores[i][0]: scores[i][1] for i in np.argsort(first).tolist()}


def distinct(values: Any) -> tuple[Any, Any]:
    """Return the distinct values, sorted, and the position at which each appears first."""
    import numpy as np

    if len(values) and (values == values[0]).all():
        return values[:1], np.zeros(1, dtype=np.int64)
    unique: tuple[Any, Any] = np.unique(values, return_index=True)
    return unique


def _spread(values: Any, places: Ints, total: int) -> Any:
    """Return a column of `total` rows that has these values at `places` and none elsewhere."""
    import numpy as np

    if isinstance(values, Text):
        codes = np.full(total, -1)
        codes[places] = values.codes
        return Text(codes, values.names)
    column = np.full(total, math.nan)
    column[places] = values
    return column


def typed(name: str, value: Any) -> Any:
    """Return a number of a column as the column's own type: bool, int or float."""
    kind = KINDS.get(name, "float64")
    return bool(value) if kind == "bool" else int(value) if kind.startswith("int") else float(value)


def ranks(names: Sequence[str]) -> Ints:
    """Return an array with each name's rank among the sorted names and, at the end, one element -1. Indexing the array
    with -1, the code of a missing name, therefore gives -1."""
    import numpy as np

    order = {name: place for place, name in enumerate(sorted(names))}
    return np.array([order[name] for name in names] + [-1])


def _column(name: str, column: pa.ChunkedArray) -> Any:
    """Return an Arrow column as a `Text` or as floats. Infinite numbers become NaN, which stands for a missing
    value."""
    import numpy as np
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
        encoded = column.dictionary_encode() if pa.types.is_string(kind) else column.unify_dictionaries()
        array = encoded.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # it has no chunk
            array = pa.array([], encoded.type)
        codes = _compact(_plain(array.indices.cast(pa.int32()), np.int32, -1))
        return Text(codes, []) if name == KEY else Text.of(array.dictionary.to_pylist(), codes)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    chunks = [_plain(chunk, np.float64, math.nan) for chunk in column.cast(pa.float64(), safe=False).chunks]
    numbers = np.concatenate([np.empty(0), *chunks])
    numbers[~np.isfinite(numbers)] = np.nan
    return _compact(numbers)


def _plain(array: pa.Array, kind: Any, missing: float) -> Any:
    """Return an Arrow array of numbers as a numpy array, with `missing` in place of null. Arrow's `to_numpy` is not
    used, because it would import pandas, which takes half a second."""
    import numpy as np

    start, end = array.offset, array.offset + len(array)
    valid, values = array.buffers()
    numbers = np.frombuffer(values or b"", dtype=kind, count=end if values else 0)[start:].copy()
    if array.null_count:
        there = np.unpackbits(np.frombuffer(valid, dtype=np.uint8), count=end, bitorder="little")[start:]
        numbers[there == 0] = missing
    return numbers


def _compact(values: Any) -> Any:
    """Return an array with the same values. If all values are equal, the returned array stores only one of them."""
    import numpy as np

    if len(values) and ((values == values[0]).all() or (values != values).all()):
        return np.broadcast_to(values[:1].copy(), values.shape)
    return values
