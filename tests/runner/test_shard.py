"""Shards of a run: what each generates, and under which name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.shards import ROWS, N, rewrite, run

from kvbench.config.parsers import BadValue
from kvbench.errors import UserError
from kvbench.runner.cell import CellPlan
from kvbench.runner.shard import Shard, agreed, parse_shard
from kvbench.store import manifest, read_run

THREE = [Shard(N, number) for number in (1, 2, 3)]


def questions(cell: CellPlan) -> Counter[str]:
    return Counter(row.prompt.doc_id for row in cell.rows)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[CellPlan, ...]]:
    """The cells of the undivided run, then those of each shard."""
    out = tmp_path_factory.mktemp("dry")
    return [run(out, shard=shard, dry_run=True).plans for shard in (None, *THREE)]


def test_each_question_of_a_cell_is_in_one_shard_with_all_samples(plans: list[tuple[CellPlan, ...]]) -> None:
    whole, *parts = plans
    for number, cell in enumerate(whole):
        divided = [questions(part[number]) for part in parts]
        assert set(questions(cell).values()) == {2}
        assert sum(divided, Counter()) == questions(cell)
        assert sum(map(len, divided)) == len(questions(cell)) == 4
    assert [sum(len(cell.rows) for cell in part) for part in parts] == [ROWS / N] * N


def test_slots_and_lengths_are_those_of_the_whole_cell(plans: list[tuple[CellPlan, ...]]) -> None:
    whole, *parts = plans
    for part in parts:
        for cell, all_rows in zip(part, whole, strict=True):
            assert shape(cell) == shape(all_rows)


def shape(cell: CellPlan) -> tuple[object, ...]:
    plan = cell.plan  # its speed limit is measured
    return plan.slots, plan.entries_peak, plan.slot_bytes, plan.peak_bytes, cell.max_tokens, cell.max_output, cell.tail


def test_every_division_has_every_question_once(plans: list[tuple[CellPlan, ...]]) -> None:
    cells = plans[0]
    for of in (1, 2, 5, 9):
        rows = [
            row.key
            for n in range(1, of + 1)
            for c, cell in enumerate(cells)
            for row in Shard(of, n)._part(c, cell).rows
        ]
        assert sorted(rows) == sorted(row.key for cell in cells for row in cell.rows)


@pytest.mark.parametrize(
    "text", ["0/2", "3/2", "a/b", "2", "2/", "/2", "1/0", "-1/2", "1/2/3", " 1/2", "1.0/2", "01/2", "1/1000000"]
)
def test_a_wrong_shard_is_an_error(text: str) -> None:
    with pytest.raises(BadValue, match="I/N with I from 1 to N"):
        parse_shard(text)


def test_a_shard_reads_back_as_written() -> None:
    assert parse_shard("2/4") == Shard(4, 2)
    assert (str(Shard(4, 2)), Shard(4, 2).suffix) == ("2/4", "-2-of-4")


@pytest.mark.parametrize(
    ("before", "asked", "text"),
    [
        ({"shard": "1/3"}, THREE[1], "is shard 1/3; you asked for --shard 2/3. Give --shard 1/3"),
        ({"shard": "1/3"}, Shard(4, 1), "is shard 1/3; you asked for --shard 1/4. Give --shard 1/3"),
        ({"shard": "1/3"}, None, "is shard 1/3; without --shard a run has all rows. Give --shard 1/3"),
        ({"device": "cpu"}, THREE[0], "has the rows of all shards; you asked for --shard 1/3. Leave out --shard"),
        ({"shard": "4/3"}, None, "the shard in the record of run 'r' must be I/N with I from 1 to N"),
    ],
)
def test_a_run_keeps_its_shard(before: dict[str, str], asked: Shard | None, text: str) -> None:
    with pytest.raises(UserError, match=text):
        agreed("r", before, asked, resume=False)


def test_a_resumed_run_knows_its_shard() -> None:
    assert agreed("r", {"shard": "1/3"}, None, resume=True) == THREE[0]
    assert agreed("r", {"device": "cpu"}, None, resume=True) is None
    with pytest.raises(UserError, match="you asked for --shard 2/3"):
        agreed("r", {"shard": "1/3"}, THREE[1], resume=True)


def test_a_shard_without_rows_is_complete(tmp_path: Path) -> None:
    result = run(tmp_path, shard=Shard(99, 98))
    assert (result.planned, result.done, result.failed) == (0, 0, {})
    snapshot = read_run(result.run_dir)
    assert (len(snapshot.table), snapshot.planned, snapshot.sealed, snapshot.unfinished) == (0, 0, True, False)


def test_the_record_of_a_shard_counts_its_own_rows(tmp_path: Path) -> None:
    """The cells of a shard differ in length, so the largest does not tell how long the others will be."""
    result = run(tmp_path, shard=Shard(8, 1))
    info = manifest.read(tmp_path / "r-1-of-8")
    assert (info["environment"]["shard"], info["environment"]["rows_of_all_shards"]) == ("1/8", ROWS)
    assert info["planned"] == result.done == 2
    assert read_run(result.run_dir).progress == "2 of 2 rows"
    with pytest.raises(UserError, match="is shard 1/8; without --shard"):
        run(tmp_path, "r-1-of-8")
    rewrite(tmp_path / "r-1-of-8", {}, shard="9/8")
    with pytest.raises(UserError, match="shard in the record of run 'r-1-of-8' must be I/N"):
        run(tmp_path, "r-1-of-8", resume=True)
