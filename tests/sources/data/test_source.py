"""Resolution of task data: order of sources, manifests, JSON lines, and the lines for a hub that fails."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import SetupError, UserError
from kvbench.sources.data import Data, hub_error, read_jsonl
from kvbench.task import Manifest


def manifest(**changes) -> Manifest:
    ids = hashlib.sha256(b"a\nb\n").hexdigest()
    return replace(Manifest(path="t/t.jsonl", rows=2, hub="org/t", split="test", ids_sha256=ids), **changes)


def folder(path: Path, *rows: dict) -> Path:
    (path / "t").mkdir(parents=True)
    (path / "t" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return folder(tmp_path / "good", {"id": "b", "x": 1}, {"id": "a", "x": 2})


def test_rows_keep_their_order_and_the_record_says_what_was_read(good: Path):
    source = Data(good, env={})
    assert [row["id"] for row in source.rows("t", manifest())] == ["b", "a"]
    used = source.used["t"]
    file = good / "t" / "t.jsonl"
    assert (used.source, used.location, used.rows, used.revision) == ("--data", str(file), 2, None)
    assert used.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert used.ids_sha256 == manifest().ids_sha256


def test_data_option_wins_over_the_environment(good: Path, tmp_path: Path):
    other = folder(tmp_path / "other", {"id": "a"}, {"id": "b"})
    source = Data(good, env={"KVBENCH_DATA": str(other)})
    assert source.rows("t", manifest())[0]["id"] == "b"
    source = Data(env={"KVBENCH_DATA": str(other)})
    assert source.rows("t", manifest())[0]["id"] == "a"
    assert source.used["t"].source == "KVBENCH_DATA"


def test_the_option_may_name_the_file(good: Path):
    assert len(Data(good / "t" / "t.jsonl", env={}).rows("t", manifest())) == 2


@pytest.mark.parametrize("env", [False, True])
def test_a_given_folder_without_the_file_is_an_error_and_no_reason_to_look_further(
    good: Path, tmp_path: Path, env: bool
):
    empty = tmp_path / "empty"
    empty.mkdir()
    source = Data(env={"KVBENCH_DATA": str(empty)}) if env else Data(empty, env={"KVBENCH_DATA": str(good)})
    with pytest.raises(SetupError, match=r"has no data for task 't': looked for '.*empty/t/t\.jsonl'"):
        source.rows("t", manifest())


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match=r"--data '.*none' does not exist"):
        Data(tmp_path / "none", env={}).rows("t", manifest())


def test_bundled_files_come_before_the_hub(good: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvbench.sources.data.source.BUNDLED", good)
    source = Data(env={"KVBENCH_DATA": ""})
    source.rows("t", manifest())
    assert source.used["t"].source == "bundled"


@pytest.mark.parametrize(
    ("changes", "rows", "what"),
    [
        ({"rows": 3}, [{"id": "a"}, {"id": "b"}], "2 rows instead of 3"),
        ({}, [{"id": "a"}, {"id": "c"}], "other ids"),
        ({}, [{"id": "a"}, {"id": "a"}], "some ids occur twice"),
        ({}, [{"id": "a"}, {}], "rows without an id"),
    ],
)
def test_rows_that_are_not_the_expected_ones(tmp_path: Path, changes: dict, rows: list[dict], what: str):
    path = folder(tmp_path / "d", *rows)
    with pytest.raises(SetupError, match=what):
        Data(path, env={}).rows("t", manifest(**changes))
    source = Data(path, env={}, allow_mismatch=True)
    assert len(source.rows("t", manifest(**changes))) == 2
    assert source.used["t"].mismatch == what


def test_hub_rows_get_the_offline_names(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked = {}

    def load(name, config, *, split, revision):
        asked.update(name=name, config=config, split=split, revision=revision)
        return datasets.Dataset.from_list([{"n": 7, "question": "Q"}, {"n": 8, "question": "R"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("kvbench.sources.data.hub_data._in_datasets_cache", lambda name: True)
    hub = manifest(rename={"question": "problem"}, hub_id=lambda index, row: "ab"[index], revision="main", config="c")
    source = Data(env={})
    assert source.rows("t", hub) == [{"n": 7, "problem": "Q", "id": "a"}, {"n": 8, "problem": "R", "id": "b"}]
    assert asked == {"name": "org/t", "config": "c", "split": "test", "revision": "main"}
    assert source.used["t"].source == "hub"
    Data(env={}, revision="abc").rows("t", hub)
    assert asked["revision"] == "abc"


def test_the_hub_is_not_reached_in_silence(tmp_path: Path):
    code = (
        "from kvbench.sources.data import Data; from kvbench.taskkit.names import get_task\n"
        "try: get_task('aime24').docs(Data(env={}))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("DataMissing task 'aime24' is not on this machine and the hub is unreachable.")
    assert "aime24/aime24.jsonl" in done.stdout


class GatedRepoError(Exception):
    pass


class DatasetNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found t.py"), "ships a loading script"),
        (GatedRepoError("403"), "is gated: accept the terms on its page and set HF_TOKEN"),
        (DatasetNotFoundError("Dataset 'org/t' is a gated dataset on the Hub."), "is gated"),
        (ConnectionError("no route"), "the hub is unreachable"),
        (DatasetNotFoundError("doesn't exist, aggregated"), "the hub has no data set 'org/t'"),
        (ValueError("boom\x1b[2J\nmore"), r"cannot be loaded: ValueError: 'boom\\x1b\[2J'"),
    ],
)
def test_hub_failures_in_one_line(error: Exception, text: str):
    found = hub_error(error, "t", manifest())
    assert isinstance(found, SetupError)
    assert re.search(text, str(found))
    assert "\n" not in str(found)


def test_causes_are_looked_at_too():
    outer = RuntimeError("while loading")
    outer.__cause__ = ConnectionError("dns")
    assert "unreachable" in str(hub_error(outer, "t", manifest()))


def lines(tmp_path: Path, content: bytes) -> list:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    return list(read_jsonl(file, "x.jsonl"))


def test_json_lines_accept_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path):
    content = b'\xef\xbb\xbf{"a": "x"}\r\n\r\n{"a": "y\\r"}'
    assert lines(tmp_path, content) == [(1, {"a": "x"}), (3, {"a": "y\r"})]


def test_json_lines_keep_line_separators_inside_text(tmp_path: Path):
    assert lines(tmp_path, '{"a": "x\u2028y\u0085z"}\n'.encode()) == [(1, {"a": "x\u2028y\u0085z"})]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{}\n{"a" "b"}', r"^x\.jsonl:2: not JSON \(expected ':' at column 6\)\.$"),
        (b'{"a": 1', r"^x\.jsonl:1: not JSON \(expected ',' at column 8\)\.$"),
        (b"[1]", "must be an object"),
        (b'{"a": NaN}', "NaN is not allowed"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        ('{"a": 1}'.encode("utf-16"), r"is not UTF-8 \(byte 0xff at offset 0\)"),
    ],
)
def test_json_lines_that_are_refused(tmp_path: Path, content: bytes, what: str):
    with pytest.raises(UserError, match=what):
        lines(tmp_path, content)


def test_only_plain_files_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    big = tmp_path / "big"
    with big.open("wb") as stream:
        stream.truncate(50 * 10**9)
    for path, what in (
        (tmp_path, "is a folder"),
        (tmp_path / "fifo", "is a pipe"),
        (Path("/dev/zero"), "is a device"),
        (big, r"has 50,000\.0 MB; the limit is"),
        (tmp_path / "none", "does not exist"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(UserError, match=what):
            list(read_jsonl(path, "x"))
