"""Data files: JSON lines, one JSON list, CSV and archives of them, read a row at a time."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from kvbench.errors import SetupError
from kvbench.sources.data.formats import CHUNK, Reading

ROWS = [{"id": "a", "x": "one\ntwo"}, {"id": "b", "x": "drei, vier"}]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("x.json", json.dumps(ROWS)),
        ("x.jsonl", "\ufeff\n " + json.dumps(ROWS, indent=2) + "\n"),
        ("x.csv", '\ufeffid,x\r\na,"one\ntwo"\r\n\r\nb,"drei, vier"\r\n\r\n'),
    ],
)
def test_forms(tmp_path: Path, name: str, content: str) -> None:
    file = written(tmp_path, name, content)
    reading = Reading([file])
    assert list(reading) == ROWS
    assert reading.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_several_files_are_one(tmp_path: Path) -> None:
    files = [written(tmp_path, f"{i}.jsonl", json.dumps(row) + "\n") for i, row in enumerate(ROWS)]
    reading = Reading(files)
    assert list(reading) == ROWS
    assert reading.sha256 == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_a_member_of_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "x.zip"
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data/a.jsonl", text)
    reading = Reading([archive], "data/a.jsonl")
    assert list(reading) == ROWS
    assert reading.sha256 == hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(SetupError, match=r"the archive '.*x\.zip' has no 'data/b\.jsonl'"):
        list(Reading([archive], "data/b.jsonl"))
    broken = bytearray(archive.read_bytes())
    broken[45] ^= 0xFF
    with pytest.raises(SetupError, match="is no zip archive that kvbench can unpack"):
        list(Reading([written(tmp_path, "y.zip", bytes(broken))], "data/a.jsonl"))
    with pytest.raises(SetupError, match="is no zip archive that kvbench can unpack"):
        list(Reading([written(tmp_path, "z.zip", archive.read_bytes()[:60])], "data/a.jsonl"))


def test_a_list_is_read_across_blocks(tmp_path: Path) -> None:
    rows = [
        {"i": i, "text": "é" * size} for i, size in enumerate([0, CHUNK // 2, 3 * CHUNK, 7, CHUNK, 0, 5 * CHUNK, 1])
    ]
    file = written(tmp_path, "x.json", json.dumps(rows, ensure_ascii=False, indent=1))
    assert list(Reading([file])) == rows


def test_memory_holds_a_row_and_not_the_file(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 100_000})
    for name, content in (("x.jsonl", f"{line}\n" * 300), ("x.json", f"[{line}{f', {line}' * 299}]")):
        file = written(tmp_path, name, content)
        tracemalloc.start()
        assert sum(1 for _ in Reading([file])) == 300
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * CHUNK, name


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.jsonl", '{"a": 1}\n{"a" 2}\n', r"x\.jsonl:2: not JSON \(expected ':' at column 6\)"),
        ("x.jsonl", "{}\n7\n", r"x\.jsonl:2: must be an object \{\.\.\.\}; got number"),
        ("x.jsonl", b"{}\n\xff\n", r"x\.jsonl is not UTF-8 \(byte 0xff at offset 3\)"),
        ("x.json", '[{"a": 1}, {"b": ]', r"x\.json: not JSON \(row 2: expected value"),
        ("x.json", '[{"a": 1} {"b": 2}]', r"row 2: expected ',' or '\]', got '\{'"),
        ("x.json", '[{"a": 1},]', r"row 2: expected '\{', got '\]'"),
        ("x.json", '[{"a": 1}', r"row 2: expected ',' or '\]', got the end of the file"),
        ("x.json", "[1]", r"row 1: expected '\{' or '\]', got '1'"),
        ("x.json", '[{"a": NaN}]', r"row 1: NaN is not allowed"),
        ("x.json", b'[{"a": "\xff"}]', r"x\.json is not UTF-8"),
        ("x.csv", "a,b\n1,2\n1\n", r"x\.csv:3: 1 fields; the first line has 2"),
        ("x.csv", 'a,b\n1,"2\n', r"x\.csv:2: not CSV"),
        ("x.csv", b"a,b\n\xff,2\n", r"x\.csv is not UTF-8"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: str | bytes, what: str) -> None:
    with pytest.raises(SetupError, match=what) as error:
        list(Reading([written(tmp_path, name, content)]))
    assert "\n" not in str(error.value)


def test_devices_and_folders_are_no_data(tmp_path: Path) -> None:
    for path, what in (
        (Path("/dev/zero"), "is a device"),
        (tmp_path, "is a folder"),
        (tmp_path / "x", "does not exist"),
    ):
        with pytest.raises(SetupError, match=what):
            list(Reading([path]))
