"""The tables: whole after every kill, honest about damage, equal for equal runs."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.errors import SetupError, UserError
from kvbench.store import RunFolder, read_columns, read_rows, read_run, read_texts, repair, table_hash, tables
from kvbench.store.again import repair_command
from kvbench.store.frames import to_frame
from kvbench.store.schema import ADDED, NAMES

Start = Callable[..., RunFolder]
Filled = Callable[..., Path]
Child = Callable[..., subprocess.Popen[str]]
Row = Callable[..., dict[str, Any]]


def test_journal_and_tables_say_the_same(filled: Filled, start: Start) -> None:
    path = filled(12)
    live, live_texts = read_run(path), read_texts(path)
    with start() as run:
        seal = run.seal()
    sealed = read_run(path)
    assert (live.sealed, sealed.sealed) == (False, True)
    assert live.progress == sealed.progress == "12 of 10 rows"
    pd.testing.assert_frame_equal(live.rows, sealed.rows)
    pd.testing.assert_frame_equal(live_texts, read_texts(path))
    assert list(sealed.rows["doc_id"]) == [f"q{i}" for i in range(12)]
    assert (seal["rows"], seal["ok"], seal["texts"], seal["dropped_records"]) == (12, 12, 12, 0)
    assert json.loads((path / "seal.json").read_text()) == seal
    assert live_texts["output"][3] == "answer 3\n\u2028 \x1b[2J é"


def test_types_in_pandas(filled: Filled) -> None:
    frame = read_rows(filled(2, seal=True))
    assert tuple(frame.columns) == NAMES
    types = {n: str(frame[n].dtype) for n in ("budget", "kv_bytes_peak", "decode_bounded", "score", "created")}
    assert types == {
        "budget": "Int32",
        "kv_bytes_peak": "Int64",
        "decode_bounded": "boolean",
        "score": "float64",
        "created": "datetime64[us, UTC]",
    }
    assert frame["thinking"].isna().all()
    assert frame["seed"][0] == "18446744073709551615"


def test_other_readers_read_it_as_it_is(filled: Filled) -> None:
    path = filled(4, seal=True) / "rows.parquet"
    frame = pd.read_parquet(path)
    assert frame.groupby("method", observed=True)["score"].mean()["gkv"] == 0.5
    assert table_hash(frame) == table_hash(to_frame(read_columns(path)))
    field = pq.read_schema(path).field("kv_bytes_peak")
    assert field.metadata[b"unit"] == b"bytes"
    assert pa.types.is_dictionary(pq.read_schema(path).field("method").type)


def test_duckdb_reads_it(filled: Filled) -> None:
    import duckdb

    path = filled(4, seal=True) / "rows.parquet"
    assert duckdb.sql(f"select method, avg(score) from '{path}' group by method").fetchall() == [("gkv", 0.5)]


def test_polars_reads_it(filled: Filled) -> None:
    import polars

    assert polars.read_parquet(filled(4, seal=True) / "rows.parquet")["score"].mean() == 0.5


def test_equal_runs_have_equal_hashes_whatever_their_order_and_time(start: Start, row: Row) -> None:
    hashes = []
    for name, order in (("a", range(20)), ("b", reversed(range(20)))):
        with start(name=name) as run:
            with run.journal() as journal:
                for i in order:
                    journal.append(row(i, decode_seconds=random.random(), slots=hash(name) % 9), output=f"a{i}")
            run.seal()
        hashes.append(table_hash(read_rows(run.path)))
    assert hashes[0] == hashes[1]
    rows = read_rows(run.path)
    rows.loc[3, "score"] += 0.5
    assert table_hash(rows) != hashes[0]


def test_another_output_is_another_hash(start: Start, row: Row) -> None:
    hashes = set()
    for name in ("a", "b"):
        with start(name=name) as run, run.journal() as journal:
            journal.append(row(0), output=name)
        hashes.add(table_hash(read_rows(run.path)))
    assert len(hashes) == 2


def test_failed_rows_have_no_score(start: Start, row: Row) -> None:
    with start() as run:
        with run.journal() as journal:
            journal.append(row(0))
            journal.append(row(1, status="oom", score=None, row_key="k"))
        run.seal()
    snapshot = read_run(run.path)
    assert (snapshot.saved, snapshot.failed, snapshot.progress) == (1, 1, "1 of 10 rows")
    assert snapshot.rows.set_index("row_key")["score"].isna()["k"]


def test_an_empty_run_has_empty_tables(filled: Filled) -> None:
    path = filled(0, seal=True)
    assert (len(read_rows(path)), len(read_texts(path)), read_run(path).sealed) == (0, 0, True)


def test_more_texts_than_one_batch(filled: Filled) -> None:
    path = filled(600, seal=True)
    texts = read_texts(path)
    assert list(texts["prompt"]) == [f"question {i}" for i in range(600)]
    assert list(texts["row_key"]) == list(read_rows(path)["row_key"])


@pytest.mark.parametrize("seal", [True, False])
def test_texts_of_some_rows(seal: bool, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(600, seal=seal)
    every = read_texts(path)
    wanted = every[every.index % 250 == 3]
    monkeypatch.delattr(pq.ParquetFile, "read")  # would have the texts of all rows in memory
    some = read_texts(path, keys={*wanted["row_key"], "no such key"})
    pd.testing.assert_frame_equal(some, wanted.reset_index(drop=True))
    assert len(some) == 3
    assert list(read_texts(path, keys=set()).columns) == list(every.columns)


def test_long_texts_are_no_damage(start: Start, row: Row) -> None:
    with start() as run:
        with run.journal() as journal:
            for i in range(10):
                journal.append(row(i), prompt=random.Random(i).randbytes(1 << 20).hex())
        run.seal()
    assert list(read_texts(run.path)["prompt"].str.len()) == [2 << 20] * 10


def test_many_segments_are_compared_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = {f"host-{i}.jsonl": i for i in range(20_000)}
    monkeypatch.setattr(tables, "segments_on_disk", lambda run_dir: segments)
    seal = {"segments": [{"name": name, "bytes": size} for name, size in segments.items()]}
    began = time.process_time()
    assert tables.is_current(tmp_path, seal)
    assert time.process_time() - began < 2
    seal["segments"][-1]["bytes"] = [7]
    assert not tables.is_current(tmp_path, seal)


def test_new_rows_outdate_the_seal(filled: Filled, start: Start, row: Row) -> None:
    path = filled(3, seal=True)
    with start() as run:
        with run.journal() as journal:
            journal.append(row(7))
        assert (read_run(path).sealed, len(read_rows(path))) == (False, 4)
        run.seal()
    assert (read_run(path).sealed, len(read_rows(path))) == (True, 4)


KILL = """
import os, sys
from kvbench.store import RunFolder, files, tables
from conftest import CONFIG, VERSIONS
files.crash_point = tables.crash_point = lambda name: name == sys.argv[2] and os.kill(os.getpid(), 9)
with RunFolder.open(sys.argv[1], "r1", CONFIG, environment=VERSIONS) as run:
    run.seal()
"""


@pytest.mark.parametrize(
    "step", ["seal removed", "texts.parquet replaced", "rows.parquet replaced", "seal.json written"]
)
def test_sealing_the_same_rows_again_may_be_killed_too(step: str, filled: Filled, child: Child) -> None:
    """Another pyarrow writes other bytes for the same rows; what lies between two seals must not pass for damage."""
    path = filled(3, seal=True)
    _rewrite(path, "rows.parquet", pq.read_table(path / "rows.parquet"))
    _rewrite(path, "texts.parquet", pq.read_table(path / "texts.parquet"))
    assert read_run(path).sealed
    assert child(KILL, path.parent, step).wait() == -9
    assert (len(read_rows(path)), len(read_texts(path))) == (3, 3)


def _rewrite(path: Path, name: str, table: pa.Table) -> None:
    """Put another table under a run's seal."""
    pq.write_table(table, path / name)
    seal = json.loads((path / "seal.json").read_text())
    seal["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "seal.json").write_text(json.dumps(seal))


class TestDamage:
    """F08: every flipped byte and every cut is an error or harmless, and repair mends it."""

    @pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.9, 0.999])
    def test_f08_a_cut_table(self, share: float, filled: Filled) -> None:
        path = filled(seal=True)
        before = read_rows(path)
        whole = (path / "rows.parquet").read_bytes()
        (path / "rows.parquet").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(SetupError) as caught:
            read_rows(path)
        assert str(caught.value) == (
            f"rows.parquet is damaged (no end mark). '{repair_command(path)}' rebuilds it from the journal."
        )
        with pytest.raises(SetupError, match="damaged"):
            read_columns(path / "rows.parquet")
        repair(path)
        pd.testing.assert_frame_equal(read_rows(path), before)

    @pytest.mark.parametrize("name", ["rows.parquet", "texts.parquet"])
    def test_f08_a_flipped_byte(self, name: str, filled: Filled) -> None:
        path = filled(seal=True)
        intact = (path / name).read_bytes()
        for position in random.Random(1).sample(range(len(intact)), 60):
            flipped = bytes([intact[position] ^ 4])
            (path / name).write_bytes(intact[:position] + flipped + intact[position + 1 :])
            with pytest.raises(SetupError, match=rf"{name} is damaged \(.*kvbench repair r1 --out"):
                (read_rows if name == "rows.parquet" else read_texts)(path)
            (path / name).write_bytes(intact)
        (path / name).unlink()
        with pytest.raises(SetupError, match=r"cannot read .*kvbench repair r1 --out"):
            (read_rows if name == "rows.parquet" else read_texts)(path)
        repair(path)
        assert len(read_texts(path)) == 6

    def test_a_flipped_data_byte_is_found_without_the_seal(self, filled: Filled, tmp_path: Path) -> None:
        """Page checksums guard a table that was copied out of its run."""
        copy = tmp_path / "copy.parquet"
        shutil.copy(filled(200, seal=True) / "rows.parquet", copy)
        meta = pq.read_metadata(copy).row_group(0)
        data = copy.read_bytes()
        for index in range(meta.num_columns):
            column = meta.column(index)
            position = column.data_page_offset + column.total_compressed_size // 2
            if column.total_compressed_size < 400:
                continue
            copy.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            with pytest.raises(SetupError, match="it cannot be decoded"):
                read_columns(copy)

    def test_repair_needs_the_journal(self, filled: Filled) -> None:
        path = filled(seal=True)
        shutil.rmtree(path / "journal")
        assert len(read_rows(path)) == 6  # a published run has only its tables
        with pytest.raises(SetupError, match="lacks"):
            repair(path)

    def test_a_run_without_its_old_journal_is_not_continued(self, filled: Filled, start: Start) -> None:
        """New tables would lack the rows that only the old ones have."""
        path = filled(seal=True)
        shutil.rmtree(path / "journal")
        with pytest.raises(SetupError, match="Put back a copy"):
            start()
        assert len(read_rows(path)) == 6


class TestFormats:
    def test_b087_a_newer_table(self, filled: Filled) -> None:
        path = filled(seal=True) / "rows.parquet"
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({"kvbench.format": "7"}), path)
        with pytest.raises(UserError) as caught:
            read_columns(path)
        assert str(caught.value).startswith("rows.parquet has format 7; this kvbench reads format 1. Read it with ")

    def test_a_table_without_a_column_is_damaged(self, filled: Filled) -> None:
        path = filled(seal=True) / "rows.parquet"
        _rewrite(path.parent, path.name, pq.read_table(path).drop_columns(["floor"]))
        with pytest.raises(SetupError, match="it has no column floor"):
            read_columns(path)
        assert (
            "floor" not in read_columns(path, ["row_key", "task", "doc_id", "sample", "method", "status"]).column_names
        )

    def test_a_table_from_before_a_column_was_added_reads_as_null(self, filled: Filled) -> None:
        path = filled(seal=True) / "rows.parquet"
        before = read_columns(path)
        _rewrite(path.parent, path.name, pq.read_table(path).drop_columns(list(ADDED)))
        after = read_columns(path)
        assert after.column_names == list(NAMES)
        assert all(after.column(name).null_count == len(after) for name in ADDED)
        assert after.drop_columns(list(ADDED)).equals(before.drop_columns(list(ADDED)))

    def test_integers_of_another_width_are_cast(self, filled: Filled) -> None:
        path = filled(seal=True) / "rows.parquet"
        table = pq.read_table(path)
        table = table.set_column(table.column_names.index("budget"), "budget", table.column("budget").cast(pa.int64()))
        _rewrite(path.parent, path.name, table)
        frame = to_frame(read_columns(path))
        assert tuple(frame.columns) == NAMES
        assert str(frame["budget"].dtype) == "Int32"

    def test_b089_a_foreign_table(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
        (tmp_path / "y.parquet").write_text("not parquet at all")
        for name in "xy":
            with pytest.raises(UserError) as caught:
                read_columns(tmp_path / f"{name}.parquet")
            assert str(caught.value) == f"{name}.parquet has no kvbench metadata. Name a file that kvbench wrote."
        with pytest.raises(UserError, match="no such file"):
            read_columns(tmp_path / "z.parquet")
