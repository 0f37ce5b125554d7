"""The worst moments: kill -9 while rows are written, a full disk, a report during a run. F01, F04, F05, F28."""

from __future__ import annotations

import os
import random
import resource
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import SetupError
from kvbench.store import Journal, RunFolder, read_rows, read_run, repair, replay, table_hash
from kvbench.store.journal import encode
from kvbench.store.schema import check_row

Start = Callable[..., RunFolder]
Row = Callable[..., dict[str, Any]]
Child = Callable[..., subprocess.Popen[str]]

WORK = """
import sys
from kvbench.store import RunFolder
from conftest import CONFIG, VERSIONS, make_row
out, count, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with RunFolder.start(out, "r1", CONFIG, environment=VERSIONS, planned=count) as run:
    done = run.done_keys()
    with run.journal() as journal:
        for i in range(count):
            row = make_row(i)
            if row["row_key"] not in done:
                saved = journal.append(row, prompt="q" * 2000, output=f"{i} " * 8000)
                if i % every == 0:
                    saved += journal.flush()
                for key in saved:
                    print(key, flush=True)
print("end", flush=True)
"""


def test_f01_kill_9_loses_no_acknowledged_row(tmp_path: Path, child: Child) -> None:
    """Twenty kills at random moments of one run; then it ends, with the table of a run that nobody disturbed."""
    rng = random.Random(4)
    acknowledged: set[str] = set()
    out, count = tmp_path / "results", 2000
    kills = 0
    for _ in range(20):
        process = child(WORK, out, count, rng.choice([1, 3, 10]))
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.random() * 0.06)
        process.kill()
        rest = process.communicate()[0]
        kills += "end" not in rest
        acknowledged |= {line for line in (first + rest).splitlines() if len(line) == 24}
        done = {key for key, ok in _ok(out / "r1") if ok}
        assert acknowledged <= done
    assert kills >= 10
    for folder in (out, tmp_path / "undisturbed"):
        assert child(WORK, folder, count, 50).communicate()[0].endswith("end\n")
    hashes = {table_hash(read_rows(folder / "r1")) for folder in (out, tmp_path / "undisturbed")}
    assert len(hashes) == 1
    assert repair(out / "r1")["nondeterministic_duplicates"] == 0


def _ok(run: Path) -> list[tuple[str, bool]]:
    frame = read_rows(run)
    return list(zip(frame["row_key"], frame["status"] == "ok", strict=True))


def _fill(run: RunFolder, row: Row, first: int = 0) -> tuple[list[str], str]:
    """Append until the disk is full. Returns the acknowledged keys and the message."""
    keys: list[str] = []
    journal = run.journal()
    with pytest.raises(SetupError) as caught:  # noqa: PT012
        for i in range(first, 1000):
            keys += journal.append(row(i), prompt="q", output=random.Random(i).randbytes(9000).hex())
            keys += journal.flush() if i % 4 == 0 else []
    journal.close()
    assert caught.value.exit_code == 3
    return keys, str(caught.value)


def test_f04_a_full_disk_stops_the_run_and_loses_nothing(small_disk: Path, start: Start, row: Row) -> None:
    _take_all_but(small_disk, 500_000)
    with start(out=small_disk) as run:
        keys, text = _fill(run, row)
        done = run.done_keys()
    assert set(keys) <= done
    assert len(done) > 10
    assert text == (
        f"cannot write in '{small_disk / 'r1'}' (no space left on device): {len(done)} rows are saved. "
        f"Free space, then continue with kvbench run --resume r1 --out {shlex.quote(str(small_disk))}."
    )
    assert run.notices == []  # the part of the record that did fit was cut off again
    (small_disk / "ballast").unlink()
    with RunFolder.resume(small_disk, "r1", environment=run.info["environment"]) as run:
        with run.journal() as journal:
            journal.append(row(len(done)), output="fits again")
        assert len(run.done_keys()) == len(done) + 1


def test_f04_a_file_size_limit_acts_like_a_full_disk(tmp_path: Path, child: Child) -> None:
    """The same without root."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, {resource.RLIM_INFINITY}))\n{WORK}"
    process = child(code, tmp_path, 100, 1)
    printed, error = process.communicate()
    assert "SetupError: cannot write in" in error
    keys = set(printed.split())
    assert f": {len(keys)} rows are saved. Raise the limit on file sizes (ulimit -f), then continue" in error
    assert len(keys) > 5
    assert {key for key, ok in _ok(tmp_path / "r1") if ok} == keys
    assert read_run(tmp_path / "r1").notices == ()


def test_f05_a_full_disk_while_sealing(small_disk: Path, start: Start, row: Row) -> None:
    with start(out=small_disk) as run:
        with run.journal() as journal:
            journal.append(row(0), output="small")
        run.seal()
        old = {name: (run.path / name).read_bytes() for name in ("rows.parquet", "texts.parquet", "seal.json")}
        with run.journal() as journal:
            for i in range(1, 31):
                journal.append(row(i), output=random.Random(i).randbytes(9000).hex())
        _take_all_but(small_disk, 40_000)
        with pytest.raises(
            SetupError, match=r"no space left.*The journal with 31 rows .*free space, then run kvbench repair r1 --out"
        ):
            run.seal()
    assert {name: (run.path / name).read_bytes() for name in old} == old
    assert len(read_rows(run.path)) == 31
    assert not [p for p in run.path.iterdir() if p.name.endswith(".tmp")]


def _take_all_but(folder: Path, left: int) -> None:
    disk = os.statvfs(folder)
    (folder / "ballast").write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - left))


def test_f28_a_report_during_a_run_of_10000_rows(tmp_path: Path, start: Start, row: Row) -> None:
    with start(planned=10_000) as run:
        folder = run.path / "journal"
        folder.mkdir()
        template = check_row(row(0))
        records = (
            encode({"kind": "row", "row": {**template, "row_key": f"k{i}", "doc_id": f"q{i}"}, "text": {}})
            for i in range(10_000)
        )
        data = b"".join(records)
        with (folder / "host-boot-1-0.jsonl").open("wb", buffering=0) as segment:
            half = data.index(b"\n", len(data) // 2) + 101  # a writer is in the middle of a record
            segment.write(data[:half])
            snapshot = read_run(run.path)
            assert snapshot.progress == f"{len(snapshot.rows)} of 10000 rows"
            assert list(snapshot.rows["doc_id"]) == [f"q{i}" for i in range(snapshot.saved)]
            assert 4000 < snapshot.saved < 6000
            assert not snapshot.sealed
            segment.write(data[half:])
        start_time = time.monotonic()
        assert read_run(run.path).progress == "10000 of 10000 rows"
        assert time.monotonic() - start_time < 20
        run.seal()
        assert read_run(run.path).sealed


def test_two_writers_at_once_lose_nothing(tmp_path: Path, row: Row) -> None:
    """Should two runners get past the lock, their rows lie in segments of their own."""
    with Journal(tmp_path) as one, Journal(tmp_path) as two:
        for i in range(100):
            one.append(row(i), output="x" * 5000)
            two.append(row(i + 50), output="x" * 5000)
    state = replay(tmp_path)
    assert (len(state.done), state.duplicates, state.nondeterministic_duplicates) == (150, 50, 0)
