"""decisions.parquet: written and read back; refused when it is not what `write` wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvbench.errors import SetupError, UserError
from kvbench.store import decisions
from kvbench.store.decisions import Decisions

ROW = Decisions(
    row_key="k", task="walk", doc_id="q1", layer=0, head=1, prompt=2,
    tokens=["a", " b", "</script>", "\x00"], seen=[2, 4], dropped=[1, 0, 2, 0],
)  # fmt: skip


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, head=0, dropped=[0, 0, 0, 0])]
    assert decisions.write(tmp_path, rows).name == "decisions.parquet"
    assert list(decisions.read(tmp_path)) == rows
    decisions.write(tmp_path, rows[:1])
    assert list(decisions.read(tmp_path)) == rows[:1]


def test_a_run_without_the_file_has_none(tmp_path: Path) -> None:
    assert list(decisions.read(tmp_path)) == []


@pytest.mark.parametrize(
    "spoilt",
    [
        replace(ROW, dropped=[1, 0, 3, 0]),
        replace(ROW, dropped=[1, 0]),
        replace(ROW, dropped=[1, 0, -1, 0]),
        replace(ROW, dropped=[1, 0, True, 0]),
        replace(ROW, seen=[4, 2]),
        replace(ROW, tokens=["a", "b", "c", 4]),  # type: ignore[list-item]
    ],
)
def test_lists_that_do_not_fit_are_refused(spoilt: Decisions, tmp_path: Path) -> None:
    decisions.write(tmp_path, [spoilt])
    with pytest.raises(SetupError, match=r"decisions\.parquet.* is damaged"):
        list(decisions.read(tmp_path))


def test_damage_foreign_files_and_links_are_refused(tmp_path: Path) -> None:
    file = decisions.write(tmp_path, [ROW])
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SetupError, match="is damaged"):
        list(decisions.read(tmp_path))
    pq.write_table(pq.read_table(decisions.write(tmp_path, [ROW])).replace_schema_metadata(None), file)
    with pytest.raises(UserError, match="no kvbench metadata"):
        list(decisions.read(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    file.unlink()
    file.symlink_to(elsewhere)
    with pytest.raises(SetupError, match="is a link"):
        list(decisions.read(tmp_path))


def test_rows_share_equal_lists(tmp_path: Path) -> None:
    decisions.write(tmp_path, [ROW, replace(ROW, head=2)])
    first, second = decisions.read(tmp_path)
    assert first.tokens is second.tokens


def test_a_small_file_of_long_lists_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long list, repeated in every row, takes hardly any space in the file."""
    count = 20_000
    long = replace(ROW, tokens=[""] * count, dropped=[0] * count)
    file = decisions.write(tmp_path, [replace(long, head=head) for head in range(100)])
    assert file.stat().st_size < 30_000
    assert len(next(decisions.read(tmp_path)).dropped) == count
    monkeypatch.setattr(decisions, "MOST", 10_000_000)
    with pytest.raises(SetupError, match="its lists take 14"):
        next(decisions.read(tmp_path))
    with pytest.raises(UserError, match="Record fewer questions"):
        decisions.write(tmp_path, [replace(long, head=head) for head in range(100)])
