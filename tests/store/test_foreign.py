"""Seals and tables that are not ours, or claim what cannot be: one line each, whatever opens the folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.errors import KVBenchError, SetupError, UserError
from kvbench.report.load import load
from kvbench.report.memory import MemoryReport
from kvbench.report.render import FORMATS
from kvbench.report.scores import ScoreReport
from kvbench.store import RunFolder, manifest, read_run, read_texts, repair

Filled = Callable[..., Path]
HASHES = {"rows.parquet": "0", "texts.parquet": "0"}
SEALS = {
    "a list": "[]",
    "null": "null",
    "a number": "7",
    "a text": '"seal"',
    "only a format": '{"format": 1}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep inside": '{"format": 1, "segments": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a huge format": '{"format": 1' + "0" * 4_000 + "}",
    "a longer number": '{"format": 1' + "0" * 5_000 + "}",
    "an endless format": '{"format": 1e999}',
    "a text as format": '{"format": "1"}',
    "segments as a number": json.dumps({"format": 1, "segments": 3, "sha256": HASHES}),
    "segments of numbers": json.dumps({"format": 1, "segments": [3], "sha256": HASHES}),
    "segments without names": json.dumps({"format": 1, "segments": [{"bytes": 3}], "sha256": HASHES}),
    "names that are none": json.dumps({"format": 1, "segments": [{"name": [], "bytes": 3}], "sha256": HASHES}),
    "no hashes": json.dumps({"format": 1, "segments": []}),
    "hashes of a list": json.dumps({"format": 1, "segments": [], "sha256": ["0"]}),
    "no hash of a table": json.dumps({"format": 1, "segments": [], "sha256": {"rows.parquet": "0"}}),
    "not JSON": "{",
    "bytes": "\x00\x01",
}


@pytest.mark.parametrize("name", SEALS)
def test_a_seal_that_is_not_ours_is_one_line_everywhere(name: str, filled: Filled, start: Callable) -> None:
    path = filled(seal=True)
    (path / "seal.json").write_text(SEALS[name], encoding="utf-8")
    before = (path / "rows.parquet").read_bytes()

    def resume() -> None:
        with start() as run:
            run.journal()

    for opens in (lambda: read_run(path), lambda: read_texts(path), lambda: load([path]), resume, lambda: repair(path)):
        with pytest.raises((UserError, SetupError), match=r"seal\.json") as caught:
            opens()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    assert (path / "rows.parquet").read_bytes() == before
    assert not (path / "lock").exists()


def test_a_seal_that_is_a_folder(filled: Filled) -> None:
    path = filled(seal=True)
    (path / "seal.json").unlink()
    (path / "seal.json").mkdir()
    for opens in (read_run, repair):
        with pytest.raises(SetupError, match=r"seal\.json' is a folder"):
            opens(path)


def test_the_advice_for_a_foreign_seal_works(filled: Filled) -> None:
    path = filled(seal=True)
    before = read_run(path).rows
    (path / "seal.json").write_text("[]")
    with pytest.raises(SetupError, match="delete it and run kvbench repair r1"):
        read_run(path)
    (path / "seal.json").unlink()
    assert repair(path)["rows"] == 6
    assert read_run(path).rows.equals(before)


def test_repair_makes_no_empty_table_of_a_run_without_journal(filled: Filled) -> None:
    path = filled(seal=True)
    shutil.rmtree(path / "journal")
    (path / "seal.json").unlink()
    before = (path / "rows.parquet").read_bytes()
    with pytest.raises(SetupError, match="has no journal"):
        repair(path)
    assert (path / "rows.parquet").read_bytes() == before


@pytest.mark.parametrize("gone", ["", "rows.parquet", "texts.parquet"])
def test_a_run_of_tables_alone_is_not_continued(gone: str, filled: Filled, start: Callable) -> None:
    """`kvbench score` and `join` open a run and seal it: its tables would become empty."""
    path = filled(seal=True)
    shutil.rmtree(path / "journal")
    for name in filter(None, ("seal.json", gone)):
        (path / name).unlink()
    before = {file: file.read_bytes() for file in path.iterdir()}
    for opens in (start, lambda: RunFolder.resume(path.parent, path.name, environment={})):
        with pytest.raises(SetupError, match="has no journal"):
            opens()
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def _sealed_with(path: Path, name: str, make: Callable[[Path], None]) -> None:
    """Put another file under a run's seal, so that its hash agrees."""
    make(path / name)
    seal = json.loads((path / "seal.json").read_text())
    seal["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "seal.json").write_text(json.dumps(seal))


def _changed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        table = pq.read_table(path)
        pq.write_table(change(table).replace_schema_metadata({"kvbench.format": "1"}), path)

    return make


def _with(name: str, values: Callable[[int], Any]) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, values(len(table)))

    return _changed(change)


def _nulls(path: Path) -> None:
    """A million rows of nothing in some hundred bytes."""
    table = pa.table({name: pa.nulls(1_000_000, pa.string()) for name in ("row_key", "task", "status")})
    pq.write_table(table.replace_schema_metadata({"kvbench.format": "1"}), path)


TABLES = {
    "scores that are texts": _with("score", lambda n: pa.array(["x"] * n)),
    "budgets that are too large": _with("budget", lambda n: pa.array([2**40] * n)),
    "status that is a list": _with("status", lambda n: pa.array([["ok"]] * n)),
    "task that is a struct": _with("task", lambda n: pa.array([{"a": 1}] * n)),
    "no row keys": _changed(lambda table: table.drop_columns(["row_key"])),
    "no task": _changed(lambda table: table.drop_columns(["task"])),
    "a row without status": _with("status", lambda n: pa.array([None] + ["ok"] * (n - 1))),
    "two columns of a name": _changed(lambda table: table.append_column("task", pa.array(["a"] * len(table)))),
    "options that are none": _with("options", lambda n: pa.array(["["] * n)),
    "options that are a list": _with("options", lambda n: pa.array(["[1]"] * n)),
    "deep options": _with("options", lambda n: pa.array(["[" * 50_000] * n)),
    "an id of 30 MB": _with("doc_id", lambda n: pa.array(["x" * 30_000_000] + ["q"] * (n - 1))),
    "many rows of nothing": _nulls,
    "no format": lambda path: pq.write_table(pa.table({"a": [1]}), path),
    "a format that is none": lambda path: pq.write_table(
        pq.read_table(path).replace_schema_metadata({"kvbench.format": "x"}), path
    ),
    "nothing": lambda path: path.write_bytes(b""),
    "four bytes": lambda path: path.write_bytes(b"PAR1"),
    "random bytes": lambda path: path.write_bytes(b"PAR1" + bytes(range(256)) * 8 + b"PAR1"),
    "a footer of zeros": lambda path: path.write_bytes(b"PAR1" + bytes(2_000) + b"\xff\x00\x00\x00PAR1"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_not_ours_is_one_line(name: str, filled: Filled) -> None:
    path = filled(seal=True)
    _sealed_with(path, "rows.parquet", TABLES[name])
    for paths in ([path], [path / "rows.parquet"]):
        with pytest.raises((UserError, SetupError)) as caught:
            ScoreReport.make(load(paths))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_texts_that_are_not_ours(filled: Filled) -> None:
    for name in ("nothing", "random bytes", "no format", "four bytes"):
        path = filled(seal=True, name=f"r-{name.replace(' ', '-')}")
        _sealed_with(path, "texts.parquet", TABLES[name])
        with pytest.raises((UserError, SetupError), match=r"texts\.parquet"):
            read_texts(path)


def test_a_table_that_is_a_folder_or_leads_nowhere(filled: Filled) -> None:
    for name, put in (("a", os.mkdir), ("b", lambda path: os.symlink("nothing", path))):
        path = filled(seal=True, name=name)
        (path / "rows.parquet").unlink()
        put(path / "rows.parquet")
        for opens in (lambda path=path: load([path]), lambda path=path: load([path / "rows.parquet"])):
            with pytest.raises(KVBenchError, match=r"rows\.parquet") as caught:
                opens()
            assert caught.value.exit_code in (2, 3)


def test_odd_numbers_are_no_bug(filled: Filled) -> None:
    """Infinities are missing, as the schema says; what is merely large is shown."""
    path = filled(seal=True)
    odd = [float("inf"), float("-inf"), float("nan"), 1e300, -1.0, 0.0]

    def change(table: pa.Table) -> pa.Table:
        for name in ("score", "entries_peak", "decode_seconds", "roofline_share", "floor"):
            table = table.set_column(table.column_names.index(name), name, pa.array(odd))
        return table

    _sealed_with(path, "rows.parquet", _changed(change))
    for kind in (ScoreReport, MemoryReport):
        report = kind.make(load([path]))
        assert all(FORMATS[name](report) for name in FORMATS)


def test_a_run_that_says_nonsense_of_its_layers(start: Callable, row: Callable) -> None:
    wrong: list[Any] = [[], 3, {"layers": 3}, {"element_bytes": 4, "layers": [{}]}]
    wrong += [{"element_bytes": 2**70, "layers": [{"kv_heads": 1, "head_dim": 1, "value_dim": 1, "window": None}]}]
    for number, cache in enumerate(wrong):
        with start(name=f"n{number}") as run:
            with run.journal() as journal:
                journal.append(row(0))
            run.seal()
        info = {k: v for k, v in run.info.items() if k not in ("hash", "hashes")}
        info["environment"] = info["environment"] | {"kv_cache": cache}
        (run.path / "run.json").write_text(json.dumps(info | manifest._hashes(info)))
        with pytest.raises(SetupError, match=r"run\.json.* is damaged"):
            MemoryReport.make(load([run.path]))


def test_on_the_command_line(filled: Filled, calls: Callable) -> None:
    seals = ("a list", "null", "only a format", "deep", "a huge format")
    for number, name in enumerate(seals):
        (filled(seal=True, name=f"s{number}") / "seal.json").write_text(SEALS[name])
    path = filled(seal=True, name="last")
    _sealed_with(path, "rows.parquet", TABLES["status that is a list"])
    names = [f"s{n}" for n in range(len(seals))]
    lines = [[command, f"results/{n}"] for n in names for command in ("report", "show", "repair")]
    lines += [[command, "results/last"] for command in ("report", "show")]
    for line, done in zip(lines, calls(path.parent.parent, [(line, {}) for line in lines])):
        assert done.code in (2, 3), (line, done)
        assert done.err.count("\n") == 1, (line, done.err)
        assert done.err.startswith("error: ")
        assert "internal error" not in done.err
        assert not done.torch
