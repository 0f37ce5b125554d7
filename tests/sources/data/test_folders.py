"""Data folders: samples that stand in, tasks that share a file, raw files as downloaded, and files that are no rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from kvbench.errors import SetupError
from kvbench.sources.data import Data
from kvbench.task import Manifest

FULL = Manifest(path="t/full.jsonl", rows=3, hub="org/t", split="test")
SAMPLED = dataclasses.replace(FULL, samples=("t/none.jsonl", "t/few.jsonl", "t/made_up.jsonl"))
SET_A = dataclasses.replace(SAMPLED, rows=2, where={"set": "a"})
SQUAD = Manifest(
    path="t/squad.json", rows=None, url="https://x.org/dev.json", url_sha256=hashlib.sha256(b"{}").hexdigest()
)


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t").mkdir()
    return tmp_path


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / "t" / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_a_sample_stands_in_only_where_the_data_are_not(folder: Path) -> None:
    put(folder, few__jsonl=lines({"x": 1}, {"x": 2}), made_up__jsonl=lines({"x": 9}))
    source = Data(folder, env={})
    assert [row["x"] for row in source.rows("t", SAMPLED)] == [1, 2]
    used = source.used["t"]
    assert (used.sample, used.mismatch) == (True, "a sample: 2 of 3 rows (t/few.jsonl)")
    assert source.notes() == ["data are samples, not the real data: 't': a sample: 2 of 3 rows (t/few.jsonl)."]
    put(folder, full__jsonl=lines({"x": 4}, {"x": 5}, {"x": 6}))
    source = Data(folder, env={})
    assert [row["x"] for row in source.rows("t", SAMPLED)] == [4, 5, 6]
    assert (source.used["t"].sample, source.notes()) == (False, [])


def test_a_sample_excuses_no_other_mistake(folder: Path) -> None:
    put(folder, few__jsonl=lines({"x": 1}), full__jsonl=lines({"x": 1}, {"x": 2}))
    with pytest.raises(SetupError, match=r"2 rows instead of 3\. .*--allow-data-mismatch uses the present data"):
        Data(folder, env={}).rows("t", SAMPLED)
    with pytest.raises(SetupError, match=r"has no data for task 't': looked for '.*/t/full\.jsonl'"):
        Data(folder / "t", env={}).rows("t", SAMPLED)


def test_samples_are_of_a_folder_and_never_of_the_hub_or_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, few__jsonl=lines({"x": 1}))
    monkeypatch.setattr("kvbench.sources.data.source.BUNDLED", folder)
    assert Data(env={}).find("t", SAMPLED) is None


def test_tasks_that_share_a_file_get_their_rows(folder: Path) -> None:
    put(folder, full__jsonl=lines({"set": "a", "x": 1}, {"set": "b", "x": 2}, {"set": "a", "x": 3}))
    assert [row["x"] for row in Data(folder, env={}).rows("t/a", SET_A)] == [1, 3]


def test_the_first_sample_with_rows_of_the_task_is_taken(folder: Path) -> None:
    put(folder, few__jsonl=lines({"set": "b", "x": 1}), made_up__jsonl=lines({"set": "a", "x": 2}))
    source = Data(folder, env={})
    assert [row["x"] for row in source.rows("t/a", SET_A)] == [2]
    assert source.used["t/a"].mismatch == "a sample: 1 of 2 rows (t/made_up.jsonl)"
    with pytest.raises(SetupError, match="has no data for task 't/c'"):
        source.rows("t/c", dataclasses.replace(SET_A, where={"set": "c"}))


def test_a_table_with_a_head_serves_under_the_same_name(folder: Path) -> None:
    put(folder, full__csv='Question,Record ID\n"one, or\ntwo?",r1\nq,r2\nq,r3\n')
    rows = Data(folder, env={}).rows("t", FULL)
    assert rows[0] == {"Question": "one, or\ntwo?", "Record ID": "r1"}
    assert len(Data(folder / "t" / "full.csv", env={}).rows("t", FULL)) == 3


def test_raw_files_beside_the_place_are_read_as_on_the_hub(folder: Path) -> None:
    raw = dataclasses.replace(
        FULL, files=("v/one.jsonl", "v/two.jsonl"), rename={"q": "question"}, hub_id=lambda i, row: f"{i}-{row['q']}"
    )
    put(folder, one__jsonl=lines({"q": "a"}))
    with pytest.raises(SetupError, match="has no data"):
        Data(folder, env={}).rows("t", raw)
    put(folder, two__jsonl=lines({"q": "b"}, {"q": "c"}))
    source = Data(folder, env={})
    assert source.rows("t", raw) == [{"question": q, "id": f"{i}-{q}"} for i, q in enumerate("abc")]
    both = lines({"q": "a"}, {"q": "b"}, {"q": "c"}).encode()
    assert source.used["t"].sha256 == hashlib.sha256(both).hexdigest()
    assert source.used["t"].location.endswith("t/one.jsonl and 1 more")


def test_an_archive_beside_the_place_or_given_by_name(folder: Path) -> None:
    with zipfile.ZipFile(folder / "t" / "data.zip", "w") as archive:
        archive.writestr("data/full.jsonl", lines({"x": 1}, {"x": 2}, {"x": 3}))
    packed = dataclasses.replace(FULL, files=("data.zip",), member="data/full.jsonl")
    for given in (folder, folder / "t" / "data.zip"):
        assert [row["x"] for row in Data(given, env={}).rows("t", packed)] == [1, 2, 3]


def test_rows_whose_number_is_not_known(folder: Path) -> None:
    put(folder, full__jsonl=lines({"x": 1}))
    assert len(Data(folder, env={}).rows("t", dataclasses.replace(FULL, rows=None))) == 1


def test_a_file_that_is_no_rows_is_known_by_its_hash(folder: Path) -> None:
    put(folder, squad__json="{}")
    source = Data(folder, env={})
    assert source.file("t", SQUAD) == folder / "t" / "squad.json"
    used = source.used["t"]
    assert (used.rows, used.sha256, used.mismatch) == (None, SQUAD.url_sha256, "")
    put(folder, squad__json="[]")
    with pytest.raises(
        SetupError, match="is not the expected file of task 't': sha256 4f53cda18c2b instead of 44136fa355b3"
    ):
        Data(folder, env={}).file("t", SQUAD)
    source = Data(folder, allow_mismatch=True, env={})
    assert source.file("t", SQUAD).is_file()
    assert source.notes() == ["data of task 't' differ: sha256 4f53cda18c2b instead of 44136fa355b3."]


def test_further_data_of_a_task_are_recorded_beside_the_first(folder: Path) -> None:
    put(folder, squad__json="{}", full__jsonl=lines({"x": 1}, {"x": 2}, {"x": 3}))
    source = Data(folder, env={})
    for _ in range(2):
        source.rows("t", FULL)
        source.file("t", SQUAD)
    used = source.used["t"]
    assert used.location.endswith("full.jsonl")
    assert [Path(more.location).name for more in used.also] == ["squad.json"]
    assert json.dumps(dataclasses.asdict(used))


def test_a_missing_column_that_names_rows_is_told(folder: Path) -> None:
    put(folder, one__jsonl=lines({"x": 1}))
    raw = dataclasses.replace(FULL, files=("one.jsonl",), hub_id=lambda i, row: row["name"])
    with pytest.raises(SetupError, match="have no column 'name'"):
        Data(folder, env={}).rows("t", raw)
