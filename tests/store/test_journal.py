"""The journal: what is acknowledged when, damage at every place, duplicates, slow and broken disks."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.console import signals
from kvbench.errors import SetupError
from kvbench.store import Journal, recovery
from kvbench.store import commit as commit_module
from kvbench.store import journal as journal_module
from kvbench.store.recovery import TextReader, decode, read_journal

Row = Callable[..., dict[str, Any]]
Patch = pytest.MonkeyPatch


@pytest.fixture
def segment(tmp_path: Path, row: Row) -> Path:
    """A segment of eight rows."""
    with Journal(tmp_path) as journal:
        for i in range(8):
            journal.append(row(i), prompt=f"q{i}", output=f"a{i} \n é")
        assert journal.segment is not None
        return journal.segment


def test_rows_and_texts_come_back(tmp_path: Path, segment: Path, row: Row) -> None:
    state = read_journal(tmp_path)
    assert state.done == {row(i)["row_key"] for i in range(8)}
    assert (state.notices, state.dropped) == ([], 0)
    assert state.segments == {segment.name: segment.stat().st_size}
    entry = state.entries[row(3)["row_key"]]
    assert (entry.row["doc_id"], entry.row["budget"], entry.row["thinking"]) == ("q3", 256, None)
    with TextReader(tmp_path) as reader:
        assert reader.read(entry) == ("q3", "a3 \n é", None)


def test_a_row_is_acknowledged_when_it_is_on_disk(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    journal = Journal(tmp_path)
    keys = [row(i)["row_key"] for i in range(5)]
    assert journal.append(row(0)) == keys[:1]  # nothing was committed for two seconds
    assert journal.append(row(1)) == []
    assert (journal.poll(), journal.saved) == ([], 1)
    now[0] += 2.0
    assert journal.append(row(2)) == keys[1:3]
    assert journal.append(row(3)) == []
    assert (journal.flush(), journal.flush()) == ([keys[3]], [])
    assert journal.append(row(4)) == []
    journal.close()
    assert journal.saved == 5
    assert read_journal(tmp_path).done == set(keys)


def test_a_segment_is_never_opened_again(tmp_path: Path, row: Row) -> None:
    for i in range(3):
        with Journal(tmp_path) as journal:
            journal.append(row(i))
    with Journal(tmp_path):
        pass  # an idle writer leaves no file
    names = sorted(p.name for p in (tmp_path / "journal").iterdir())
    assert [n.rsplit("-", 2)[1:] for n in names] == [[str(os.getpid()), f"{i}.jsonl"] for i in range(3)]
    with pytest.raises(RuntimeError):
        journal.append(row(9))


def test_a_folder_that_another_worker_makes_meanwhile_is_used(tmp_path: Path, row: Row, monkeypatch: Patch) -> None:
    (tmp_path / "journal").mkdir()
    monkeypatch.setattr(journal_module, "own_folder", lambda folder: False)  # as if looked up just before
    with Journal(tmp_path) as journal:
        journal.append(row(0))
    assert read_journal(tmp_path).done == {row(0)["row_key"]}


def test_texts_of_many_segments_need_few_open_files(tmp_path: Path, row: Row, monkeypatch: Patch) -> None:
    for i in range(5):
        with Journal(tmp_path) as journal:
            journal.append(row(i), output=f"a{i}")
    entries = list(read_journal(tmp_path).entries.values())
    monkeypatch.setattr(recovery, "MOST_OPEN", 2, raising=False)
    before = len(os.listdir("/proc/self/fd"))
    with TextReader(tmp_path) as reader:
        for i in (0, 1, 2, 3, 4, 0, 4, 0):
            assert reader.read(entries[i])[1] == f"a{i}"
            assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_process_may_not_use_it(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="another process"):
        journal.append(row(0))


def test_a_torn_last_record_costs_one_row(tmp_path: Path, segment: Path, row: Row) -> None:
    whole = segment.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    first = {row(i)["row_key"] for i in range(7)}
    for cut in range(start, len(whole)):
        segment.write_bytes(whole[:cut])
        state = read_journal(tmp_path)
        assert state.done == first, cut
        assert len(state.notices) == (cut > start)
    assert state.notices == [f"{segment.name}: the unfinished record at offset {start} is dropped; its row runs again."]


def test_a_segment_counts_up_to_the_length_it_had(
    tmp_path: Path, segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are added while the journal is read belong to the next snapshot."""
    end = [i for i, b in enumerate(segment.read_bytes()) if b == 10][4] + 1
    listed = {segment.name: end}
    monkeypatch.setattr(recovery, "segments_on_disk", lambda run_dir: listed)
    assert (len(read_journal(tmp_path).done), read_journal(tmp_path).notices) == (5, [])
    listed[segment.name] = end + 20
    assert (len(read_journal(tmp_path).done), len(read_journal(tmp_path).notices)) == (5, 1)


def test_the_row_of_a_torn_record_runs_again(tmp_path: Path, segment: Path, row: Row) -> None:
    os.truncate(segment, segment.stat().st_size - 5)
    with Journal(tmp_path) as journal:
        journal.append(row(7), output="again")
    state = read_journal(tmp_path)
    assert len(state.done) == 8
    assert state.entries[row(7)["row_key"]].offset == 0


def test_any_flipped_byte_costs_only_the_rows_it_touches(tmp_path: Path, segment: Path) -> None:
    whole = segment.read_bytes()
    starts = [0] + [i + 1 for i, b in enumerate(whole) if b == 10]
    keys = list(read_journal(tmp_path).entries)
    for position in random.Random(0).sample(range(len(whole)), 400):
        record = next(i for i, s in enumerate(starts) if position < starts[i + 1])
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        segment.write_bytes(damaged)
        state = read_journal(tmp_path)
        lost = set(keys) - state.done
        joined = position == starts[record + 1] - 1  # its line feed: the next record is glued to it
        assert lost == set(keys[record : record + 1 + joined]), position
        assert len(state.notices) in (1, 2)
        assert state.dropped >= 1
        assert str(starts[record]) in state.notices[0]


def test_many_damaged_records_make_one_notice(tmp_path: Path, segment: Path) -> None:
    segment.write_bytes(segment.read_bytes().replace(b'"task":"walk"', b'"task":"talk"'))
    (notice,) = read_journal(tmp_path).notices
    assert notice.startswith(f"{segment.name}: damaged records are skipped, at offset 0, ")
    assert notice.endswith(" and 3 more; their rows run again.")


@pytest.mark.parametrize("line", [b"", b"\n", b"00000000 \n", b"00000000 {}\n", b"x" * 20 + b"\n", b"\x00" * 4096])
def test_lines_that_are_no_records(line: bytes) -> None:
    assert decode(line) is None


def test_a_failure_gives_way_to_a_later_success_and_never_the_other_way(tmp_path: Path, row: Row) -> None:
    failed = {"status": "oom", "score": None}
    with Journal(tmp_path) as journal:
        for status in (failed, {**failed, "note": "second"}):
            journal.append(row(0, **status))
        journal.append(row(1))
        journal.append(row(1, **failed))
    state = read_journal(tmp_path)
    assert state.entries[row(0)["row_key"]].row["note"] == "second"
    assert state.done == {row(1)["row_key"]}
    with Journal(tmp_path) as journal:
        journal.append(row(0))
    assert len(read_journal(tmp_path).done) == 2


def test_duplicates_the_first_counts_and_differences_are_counted(tmp_path: Path, row: Row) -> None:
    with Journal(tmp_path) as journal:
        for output in ("same", "same", "other"):
            journal.append(row(0), output=output)
        journal.append(row(1), output="x")
    state = read_journal(tmp_path)
    assert (len(state.done), state.duplicates, state.nondeterministic_duplicates) == (2, 2, 1)
    assert state.notices == ["rows generated twice with different results: 1; the first result of each counts."]
    with TextReader(tmp_path) as reader:
        assert reader.read(state.entries[row(0)["row_key"]]) == (None, "same", None)


def test_a_slow_sync_holds_up_nobody(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are written while a sync is under way belong to the next one."""
    disk = threading.Event()
    monkeypatch.setattr(journal_module, "_datasync", lambda fd: disk.wait(60))
    monkeypatch.setattr(journal_module, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(journal_module, "PATIENCE_SECONDS", 0.01)
    keys = [row(i)["row_key"] for i in range(3)]
    journal = Journal(tmp_path)
    assert [journal.append(row(i)) for i in range(3)] == [[], [], []]
    assert (journal.poll(), journal.saved) == ([], 0)
    disk.set()
    assert journal.flush() == keys
    assert journal.saved == 3
    journal.close()


def test_a_sync_that_fails_beside_the_generation(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are not counted, nor are those after it, and nothing is synced again."""
    disk, calls = threading.Event(), []

    def broken(fd: int) -> None:
        calls.append(fd)
        disk.wait(60)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal_module, "_datasync", broken)
    monkeypatch.setattr(journal_module, "PATIENCE_SECONDS", 0.01)
    journal = Journal(tmp_path, rows_before=7)
    assert journal.append(row(0)) == journal.append(row(1)) == []
    disk.set()
    with pytest.raises(SetupError, match=r"\(input/output error\): 7 rows are saved"):
        journal.flush()
    journal.close()
    assert (len(calls), journal.saved) == (1, 0)


def test_a_full_disk_while_a_sync_is_under_way(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows before the one that did not fit are saved."""
    real, disk, part = os.write, threading.Event(), []

    def full(fd: int, data: bytes) -> int:
        if part:
            raise OSError(errno.ENOSPC, "No space left on device")
        part.append(real(fd, data[:50]))
        return part[0]

    monkeypatch.setattr(journal_module, "_datasync", lambda fd: disk.wait(0.2))
    monkeypatch.setattr(journal_module, "PATIENCE_SECONDS", 0.01)
    journal = Journal(tmp_path)
    journal.append(row(0))
    journal.append(row(1))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SetupError, match=r"no space left on device\): 2 rows are saved"):
        journal.append(row(2))
    monkeypatch.undo()
    state = read_journal(tmp_path)
    assert (state.done, state.notices) == ({row(0)["row_key"], row(1)["row_key"]}, [])


def test_a_writer_beside_others_states_no_number(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows its own rows only; the user wants to know how many the run has."""
    journal = Journal(tmp_path, rows_before=None)
    journal.append(row(0))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(full))
    with pytest.raises(SetupError, match=r"\(no space left on device\)\. Free space, then continue with kvbench run"):
        journal.append(row(1))


def test_two_writers_at_once_lose_nothing(tmp_path: Path, row: Row) -> None:
    """Should two runners get past the lock, their rows lie in segments of their own."""
    with Journal(tmp_path) as one, Journal(tmp_path) as two:
        for i in range(100):
            one.append(row(i), output="x" * 5000)
            two.append(row(i + 50), output="x" * 5000)
    state = read_journal(tmp_path)
    assert (len(state.done), state.duplicates, state.nondeterministic_duplicates) == (150, 50, 0)


def test_a_row_whose_sync_failed_is_not_acknowledged(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path)
    journal.append(row(0))
    monkeypatch.setattr(journal_module, "_datasync", broken)
    journal.append(row(1))
    with pytest.raises(SetupError, match=r"\(input/output error\): 1 row is saved\. Check the disk"):
        journal.flush()
    journal.close()
    assert journal.saved == 1


def test_importing_the_store_is_cheap(child: Callable[..., subprocess.Popen[str]]) -> None:
    code = "import sys, kvbench.store; print([m for m in ('torch', 'pandas', 'pyarrow', 'numpy') if m in sys.modules])"
    assert child(code).communicate()[0] == "[]\n"


def test_a_sync_that_fails_in_any_way_acknowledges_nothing(tmp_path: Path, row: Row, monkeypatch: Patch) -> None:
    def fail(fd: int) -> None:
        raise MemoryError("no memory for the sync")

    monkeypatch.setattr(journal_module, "_datasync", fail)
    monkeypatch.setattr(journal_module, "COMMIT_SECONDS", 3600.0)
    journal = Journal(tmp_path)
    journal._last_commit = time.monotonic()
    journal.append(row(1))
    with pytest.raises(SetupError, match=r"no memory for the sync.*: 0 rows are saved"):
        journal.flush()
    assert (journal.saved, journal.failed) == (0, True)


def test_without_a_thread_the_writer_waits_for_the_disk(tmp_path: Path, row: Row, monkeypatch: Patch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Journal(tmp_path) as journal:
        saved = journal.append(row(1)) + journal.flush()
    assert len(saved) == journal.saved == 1


def test_a_signal_while_a_commit_begins_counts_no_row_twice(tmp_path: Path, row: Row, monkeypatch: Patch) -> None:
    with signals.handled(), Journal(tmp_path) as journal:
        monkeypatch.setattr(commit_module.Commit, "__init__", _signalled(commit_module.Commit.__init__))
        saved: list[str] = []
        with pytest.raises(signals.Signalled):
            saved += journal.append(row(1))
        monkeypatch.undo()
        saved += journal.flush()
        assert (len(saved), journal.saved) == (1, 1)


def _signalled(begin: Callable[..., None]) -> Callable[..., None]:
    """Begin a commit, and be interrupted while its keys change hands."""

    def interrupted(*arguments: object) -> None:
        begin(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    return interrupted
