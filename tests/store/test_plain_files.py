"""Files of a run that are links, pipes or devices are not opened; what may come from anyone is read strictly."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile_run import _records, append, edit, first_row

from kvbench.cli.app import main
from kvbench.errors import SetupError, UserError
from kvbench.store import RunFolder, read_run, repair
from kvbench.store.again import line, words
from kvbench.store.files import open_plain, own_folder, read_plain, remove_leftovers
from kvbench.store.recovery import read_journal
from kvbench.store.strict_json import document, parse

Filled = Callable[..., Path]


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert read_plain(tmp_path / "file", 4) == b"mine"
    with pytest.raises(SetupError, match="is larger than"):
        read_plain(tmp_path / "file", 3)
    for name in ("link", "pipe", "folder"):
        with pytest.raises(SetupError, match=rf"is a {name}, where a run needs a file"):
            open_plain(tmp_path / name)
    with pytest.raises(SetupError, match="is a device"):
        open_plain(Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")
    assert own_folder(tmp_path / "folder")
    assert not own_folder(tmp_path / "none")
    (tmp_path / "other").symlink_to("folder")
    with pytest.raises(SetupError, match="where a run needs a folder"):
        own_folder(tmp_path / "other")


def test_leftovers_that_are_no_files_stay(tmp_path: Path) -> None:
    for name in (".a.1-01234567.tmp", ".b.1-01234567.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".c.1-01234567.tmp").touch()
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["[" * 100_000, "NaN", "[1e400]", "-Infinity", "1" + "0" * 100_000, "{", '"\x00"'])
def test_bad_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@pytest.mark.parametrize("value", [[[[]] * 3] * 3, {"a": 2**64, "b": None}, 1.5])
def test_a_document_comes_back(value: object) -> None:
    assert document(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[" * 40 + "]" * 40, '{"a": [18446744073709551617]}'])
def test_a_document_can_be_walked(text: str) -> None:
    parse(text)
    with pytest.raises(ValueError, match=r"too deeply|beyond 64 bits"):
        document(text)


@pytest.mark.parametrize("name", sorted(_records()))
def test_a_record_that_is_no_row_counts_as_damaged(filled: Filled, name: str) -> None:
    path = filled(3)
    append(path, _records()[name](first_row(path)))
    state = read_journal(path)
    if name == "unknown":  # of a newer version: the row counts without it
        assert (state.dropped, len(state.entries)) == (0, 4)
    else:
        assert (state.dropped, len(state.entries)) == (1, 3)
        assert "damaged records are skipped" in state.notices[0]
    assert repair(path)["rows"] == len(state.entries)
    assert len(read_run(path).rows) == len(state.entries)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda r: r["environment"].update(torch_version="2.14.0"), "'environment' differs from its hash"),
        (lambda r: r.update(planned=11), "'planned' differs from its hash"),
        (lambda r: r.update(command=["x"], created="y"), "'command', 'created' differ from their hashes"),
        (lambda r: r.update(extra=1), "'extra' differs from its hash"),
        (lambda r: r.pop("planned"), "'planned' differs from its hash"),
        (lambda r: r.update(hash="0" * 64), "the hash of the whole record differs"),
    ],
)
def test_an_edit_anywhere_is_refused_by_name(filled: Filled, change: Callable, part: str) -> None:
    path = filled(1)
    record = json.loads((path / "run.json").read_text())
    change(record)
    (path / "run.json").write_text(json.dumps(record))
    for call in (lambda: read_run(path), lambda: repair(path)):
        with pytest.raises(UserError) as caught:
            call()
        assert f"run.json' was changed by hand: {part}. Undo the change" in str(caught.value)


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_record_of_another_format_is_refused_by_name(number: int, filled: Filled) -> None:
    path = filled(1)
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | {"format": number}))
    with pytest.raises(UserError, match=rf"run\.json has format {number}; this kvbench reads format 1\. Read it with"):
        read_run(path)


def test_a_record_without_hashes_is_damaged(filled: Filled) -> None:
    path = filled(1)
    record = json.loads((path / "run.json").read_text())
    for part in ("hash", "hashes"):
        (path / "run.json").write_text(json.dumps({name: value for name, value in record.items() if name != part}))
        with pytest.raises(SetupError, match="is damaged"):
            read_run(path)


@pytest.mark.parametrize(
    ("part", "entries"),
    [
        ("model_files", [{"name": "a\nerror: b", "hash": "0"}]),
        ("method_files", [{"name": "a", "hash": "0\x1b[2J"}]),
        ("versions", {"torch": "1\n2"}),
    ],
)
def test_what_kvbench_wrote_has_no_control_characters(filled: Filled, part: str, entries: object) -> None:
    path = filled(1)
    edit(path, lambda record: record["environment"].update({part: entries}))
    with pytest.raises(SetupError, match=rf"is damaged \(environment\.{part}"):
        read_run(path)


def test_a_lock_with_a_second_name_is_not_written(filled: Filled, tmp_path: Path) -> None:
    path = filled(1)
    (tmp_path / "precious").write_text("mine")
    os.link(tmp_path / "precious", path / "lock")
    with pytest.raises(SetupError, match="a hard link"):
        repair(path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_rows_do_not_leave_through_a_link(filled: Filled, start: Callable[..., RunFolder], tmp_path: Path) -> None:
    path = filled(0)
    (tmp_path / "elsewhere").mkdir()
    (path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="journal' is a link"), start() as run:
        run.done_keys()
    assert not list((tmp_path / "elsewhere").iterdir())


WORDS = ["a b", "it's", "\x1b[2J", "new\nline", "tab\tquote'back\\", "\u202e", "é", "-x", "\udcff"]


def test_a_command_is_typed_as_it_is_printed() -> None:
    printed = line(["printf", r"%s\0", *WORDS])
    assert printed.isprintable() or not any(ord(c) < 32 for c in printed)
    done = subprocess.run(["bash", "-c", printed], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode(errors="surrogateescape").split("\0")[:-1] == WORDS
    assert shlex.split(line(words({"plugin": ["a.py", "-b.py"], "unsafe_run_code": True, "judge_mode": "pair"}))) == [
        *("--plugin", "a.py", "--plugin=-b.py", "--unsafe-run-code", "--judge-mode", "pair")
    ]


def test_edited_hashes_pass(filled: Filled) -> None:
    """The tests' own forger is a good one: what is refused elsewhere is not refused for its hash."""
    path = filled(1)
    edit(path, lambda r: r.update(planned=11))
    assert read_run(path).planned == 11


@pytest.mark.parametrize("command", ["report", "show", "repair"])
def test_a_pipe_in_place_of_the_record_is_refused_by_name(
    command: str, filled: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    path = filled(seal=True)
    (path / "run.json").unlink()
    os.mkfifo(path / "run.json")
    assert main([command, str(path)]) == 3
    assert re.search(r"run\.json' is a (pipe|FIFO|named pipe)", capsys.readouterr().err)


def test_repair_says_which_records_it_drops(filled: Filled) -> None:
    path = filled(seal=True)
    segment = next((path / "journal").iterdir())
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(lines[0] + lines[1].replace(b"walk", b"walc") + b"".join(lines[2:]))
    for name in ("rows.parquet", "texts.parquet", "seal.json"):
        (path / name).unlink()
    said: list[str] = []
    assert repair(path, say=said.append)["rows"] == len(lines) - 1
    assert [f"damaged records are skipped, at offset {len(lines[0])};" in text for text in said] == [True]
