"""How often commands read the segments of a journal from one end to the other."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.final_tables import differences
from support.shards import ROWS, N, run

from kvbench.runner.join import join
from kvbench.runner.shard import Shard
from kvbench.runner.shard_folder import read_shards
from kvbench.store import recovery, repair
from kvbench.store.recovery import read_journal

Reads = Counter[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    run(out, "whole")
    for number in range(1, N + 1):
        run(out, "r", Shard(N, number))
    return out


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts how often each line of a journal is read, as "folder/segment offset"."""
    lines, read = recovery._lines, Counter[str]()

    def counted(path: Path, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
        for at, line in lines(path, offset, size):
            read[f"{path.parent.parent.name}/{path.name} {at}"] += 1
            yield at, line

    monkeypatch.setattr(recovery, "_lines", counted)
    return read


def test_a_new_run_reads_its_rows_once(tmp_path: Path, read: Reads) -> None:
    run(tmp_path, "r")
    assert (len(read), set(read.values())) == (ROWS, {1})
    read.clear()
    run(tmp_path, "r")  # complete: nothing is generated
    assert (len(read), set(read.values())) == (ROWS, {1})


def test_a_resumed_run_reads_earlier_rows_at_its_begin_and_its_end(made: Path, tmp_path: Path, read: Reads) -> None:
    shutil.copytree(made / "whole", tmp_path / "whole")
    [segment] = (tmp_path / "whole" / "journal").iterdir()
    for table in ("rows.parquet", "texts.parquet", "seal.json"):
        (tmp_path / "whole" / table).unlink()
    records = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(records[:-2]))
    run(tmp_path, "whole")
    assert Counter(read.values()) == {2: ROWS - 2, 1: 2}
    assert differences(made / "whole", tmp_path / "whole") == []


def test_join_reads_every_shard_once_and_its_own_rows_once(made: Path, tmp_path: Path, read: Reads) -> None:
    shards = read_shards([made / f"r-{number}-of-{N}" for number in range(1, N + 1)])
    for again in (False, True):
        read.clear()
        join(shards, tmp_path, "r", command=[], say=str)
        assert (len(read), set(read.values())) == (2 * ROWS, {1}), again


def test_repair_reads_once(made: Path, tmp_path: Path, read: Reads) -> None:
    shutil.copytree(made / "whole", tmp_path / "whole")
    repair(tmp_path / "whole")
    assert (len(read), set(read.values())) == (ROWS, {1})


def test_what_was_added_gives_the_content_of_a_whole_reading(made: Path, tmp_path: Path) -> None:
    """Also if a new segment stands before an old one, a record grows, and the same row comes twice."""
    [segment] = (made / "whole" / "journal").iterdir()
    records = segment.read_bytes().splitlines(keepends=True)
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(b"".join(records[:6]) + records[6][:40])
    content = read_journal(tmp_path)
    assert (len(content.entries), content.dropped, len(content.notices)) == (6, 1, 1)
    (folder / "b.jsonl").write_bytes(b"".join(records[:8]) + b"damaged\n")
    (folder / "a.jsonl").write_bytes(b"".join(records[4:10]))
    assert read_journal(tmp_path, content) is content
    assert content == read_journal(tmp_path)
    assert (len(content.entries), content.duplicates, content.dropped) == (10, 4, 1)
    (folder / "a.jsonl").unlink()
    fresh = read_journal(tmp_path, content)
    assert fresh is not content
    assert len(fresh.entries) == 8
