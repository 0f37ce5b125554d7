"""Data from a hub on this machine: tables, raw files, what it refuses, and `kvbench data fetch` from it."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hub import COMMIT, Hub, Repo, environment

PINNED = "2" * 40
TASKS = f"""
PINNED = "{PINNED}"
import dataclasses
from kvbench.registry import tasks
from kvbench.task import Manifest, Task

class Base(Task):
    def docs(self, source, *, style="default", limit=None): raise NotImplementedError
    def gen(self, model_type): raise NotImplementedError
    def score(self, doc, output): raise NotImplementedError

def register(name, **fields):
    tasks.register(name)(type(name, (Base,), {{"manifest": Manifest(path=f"t/{{name}}.jsonl", **fields)}}))

NAMED = {{"rename": {{"q": "question"}}, "hub_id": lambda index, row: f"id-{{index}}"}}
register("table", rows=2, hub="org/table", split="test", revision=PINNED, licence="MIT", **NAMED)
register("lines", rows=3, hub="org/files", files=("one.jsonl", "two.jsonl"), revision=PINNED)
register("renamed", rows=1, hub="org/files", files=("three.jsonl",), revision=PINNED, **NAMED)
register("listed", rows=2, hub="org/files", files=("list.json",), revision=PINNED)
register("packed", rows=2, hub="org/files", files=("data.zip",), member="data/set.jsonl", revision=PINNED)
register("secret", rows=2, hub="org/gated", files=("x.csv",), revision=PINNED, gated=True, licence="CC-BY-4.0")
register("secret_table", rows=2, hub="org/gated", split="test", revision=PINNED, gated=True)
register("moved", rows=2, hub="org/moved", files=("x.jsonl",), revision=PINNED)
register("gone", rows=2, hub="org/nothing", files=("x.jsonl",), revision=PINNED)
register("script", rows=2, hub="org/script", split="test", revision=PINNED)
register("broken", rows=9, hub="org/files", files=("one.jsonl",), revision=PINNED)
"""


def lines(*rows: dict) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in members.items():
            file.writestr(f"data/{name}.jsonl", data)
    return buffer.getvalue()


FILES = {
    "one.jsonl": lines({"q": "a"}, {"q": "b"}),
    "two.jsonl": lines({"q": "c"}),
    "three.jsonl": lines({"q": "d"}),
    "list.json": json.dumps([{"q": "a"}, {"q": "b"}], indent=1).encode(),
    "data.zip": archive(set=lines({"q": "a"}, {"q": "b"}), other=lines({"q": "z"})),
}
REPOS = {
    "datasets/org/table": Repo({"test.jsonl": lines({"q": "ä", "n": 1}, {"q": "b", "n": 2})}, PINNED),
    "datasets/org/files": Repo(FILES, PINNED),
    "datasets/org/gated": Repo({"x.csv": b"q\n1\n2\n", "test.jsonl": lines({"q": "a"})}, PINNED, gated=True),
    "datasets/org/moved": Repo({"x.jsonl": lines({"q": "a"}, {"q": "b"})}, COMMIT),
    "datasets/org/script": Repo({"script.py": b"raise SystemExit('ran')", "README.md": b"#"}, PINNED),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(dict(REPOS)).running() as hub:
        yield hub


@pytest.fixture(scope="module")
def data(calls: Callable, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """data("fetch table", ...): `kvbench data` for each line, one after the other in one process."""
    home = tmp_path_factory.mktemp("home")
    (home / "mine.py").write_text(TASKS)

    def run(*lines: str, folder: Path | None = None, url: str = hub.url) -> list:
        argv = [["data", *line.split(), "--plugin", str(home / "mine.py")] for line in lines]
        return calls(folder or home, [(words, environment(url, folder or home)) for words in argv])

    return run


@pytest.fixture(scope="module")
def fetched(data: Callable, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Everything that can be had, fetched twice, and then checked."""
    folder = tmp_path_factory.mktemp("fetched")
    names = "table lines renamed listed packed"
    hub.asked.clear()
    (first,) = data(f"fetch {names} --out d --json", folder=folder)
    asked = list(hub.asked)
    hub.asked.clear()
    again, check, path = data(
        f"fetch {names} --out d --json", f"check {names} --data d --json", "path packed table --data d", folder=folder
    )
    return {
        "folder": folder / "d",
        "first": first,
        "again": again,
        "check": check,
        "path": path,
        "asked": asked,
        "asked again": list(hub.asked),
    }


def test_fetched_data_are_rows_in_the_offline_form(fetched: dict) -> None:
    assert fetched["first"].code == 0, fetched["first"].err
    folder = fetched["folder"] / "t"
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["data.zip", "listed.jsonl", "one.jsonl", "renamed.jsonl", "table.jsonl", "two.jsonl"]
    table = [json.loads(line) for line in (folder / "table.jsonl").read_text(encoding="utf-8").splitlines()]
    assert table == [{"question": "ä", "n": 1, "id": "id-0"}, {"question": "b", "n": 2, "id": "id-1"}]
    assert (folder / "listed.jsonl").read_bytes() == FILES["list.json"]
    assert (folder / "data.zip").read_bytes() == FILES["data.zip"]
    assert json.loads((folder / "renamed.jsonl").read_text()) == {"question": "d", "id": "id-0"}


def test_the_report_says_rows_and_licence(fetched: dict) -> None:
    rows = {row["task"]: row for row in json.loads(fetched["first"].out)["tasks"]}
    assert (rows["table"]["rows"], rows["table"]["licence"], rows["table"]["gated"]) == (2, "MIT", False)
    assert (rows["lines"]["rows"], rows["packed"]["rows"], rows["renamed"]["licence"]) == (3, 2, None)


def test_what_is_there_is_not_fetched_again(fetched: dict) -> None:
    assert fetched["again"].code == 0, fetched["again"].err
    assert any("data.zip" in line for line in fetched["asked"])
    assert fetched["asked again"] == []


def test_the_folder_serves_without_a_network(fetched: dict) -> None:
    assert fetched["check"].code == 0, fetched["check"].err
    document = json.loads(fetched["check"].out)
    assert document["ok"]
    assert {row["state"] for row in document["tasks"]} == {"ok"}
    assert {row["source"] for row in document["tasks"]} == {"--data"}
    listed = next(row for row in document["tasks"] if row["task"] == "listed")
    assert listed["sha256"] == hashlib.sha256(FILES["list.json"]).hexdigest()
    assert [Path(line).name for line in fetched["path"].out.splitlines()] == ["data.zip", "table.jsonl"]


def test_a_damaged_copy_is_fetched_anew(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "d/t").mkdir(parents=True)
    (tmp_path / "d/t/listed.jsonl").write_bytes(FILES["list.json"][:20])
    check, fetch, after = data(
        "check listed --data d", "fetch listed --out d", "check listed --data d", folder=tmp_path
    )
    assert (check.code, fetch.code, after.code) == (3, 0, 0)
    assert "listed (wrong)" in check.err
    assert "note: 1 of 1 tasks are in d; --data d or KVBENCH_DATA=d uses them." in fetch.err


def test_check_finds_what_was_downloaded_before(data: Callable, tmp_path: Path) -> None:
    before, fetch, after = data(
        "check lines table", "fetch lines table --out d", "check lines table --json", folder=tmp_path
    )
    assert before.code == 3
    assert "2 of 2 tasks are missing, wrong or only a sample: lines (missing), table (missing)." in before.err
    assert (fetch.code, after.code) == (0, 0)
    rows = json.loads(after.out)["tasks"]
    assert [(row["source"], row["revision"], row["state"]) for row in rows] == [("hub", PINNED, "ok")] * 2


REFUSED = [
    ("secret", "error: data set 'org/gated' is gated: accept the terms on its page and set HF_TOKEN."),  # B071
    ("secret_table", "error: data set 'org/gated' is gated: accept the terms on its page and set HF_TOKEN."),
    ("gone", "error: the hub has no data set 'org/nothing' (or it is private and HF_TOKEN is not set)."),
    ("script", "error: data set 'org/script' ships a loading script; kvbench reads only parquet/JSON/arrow files."),
    (
        "moved",
        "error: 'org/moved' is at revision 1111111, but the task pins 2222222. Use --data-revision to choose.",
    ),  # B073
    ("broken", "are not the expected ones: 2 rows instead of 9."),
    ("lines --data-revision nowhere", "data set 'org/files' has no revision 'nowhere' on the hub."),
]


@pytest.fixture(scope="module")
def refused(data: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("refused")
    tasks = [task for task, _ in REFUSED]
    return dict(zip(tasks, data(*(f"fetch {task} --out {i}" for i, task in enumerate(tasks)), folder=folder)))


@pytest.mark.parametrize(("task", "text"), REFUSED)
def test_what_the_hub_refuses(refused: dict, task: str, text: str) -> None:
    result = refused[task]
    assert result.code == 3
    assert text in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert result.torch is False


def test_another_revision_is_chosen_by_name(data: Callable, tmp_path: Path) -> None:
    (result,) = data("fetch moved --data-revision main --out d", folder=tmp_path)
    assert result.code == 0, result.err
    assert (tmp_path / "d/t/moved.jsonl").is_file()


def test_a_gated_set_and_its_licence_are_named(data: Callable, hub: Hub, tmp_path: Path) -> None:
    hub.repos["datasets/org/gated"].gated = False  # the terms were accepted
    try:
        (result,) = data("fetch secret --out d", folder=tmp_path)
    finally:
        hub.repos["datasets/org/gated"].gated = True
    assert result.code == 0, result.err
    assert "note: 'org/gated' is gated: its terms have to be accepted on its page." in result.err
    assert "CC-BY-4.0 (gated)" in result.out


def test_an_unreachable_hub_is_told_soon(data: Callable, tmp_path: Path) -> None:
    (result,) = data("fetch table --out d", folder=tmp_path, url="http://127.0.0.1:9")
    assert result.code == 3
    assert (
        "error: task 'table' is not on this machine and the hub is unreachable. 'kvbench data fetch table' on a "
        "connected machine makes a folder with t/table.jsonl for --data or KVBENCH_DATA."
    ) in result.err  # B070


def test_gated_data_say_what_they_need_where_the_hub_is_unreachable(data: Callable, tmp_path: Path) -> None:
    (result,) = data("fetch secret --out d", folder=tmp_path, url="http://127.0.0.1:9")
    assert result.code == 3
    assert (
        "'secret' is gated: accept the terms on the hub's page and set HF_TOKEN on the connected machine." in result.err
    )


def test_data_of_lm_eval_are_refused_before_anything_is_fetched(data: Callable, hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    (result,) = data("fetch table lm_eval:gsm8k --out d", folder=tmp_path)
    assert (result.code, result.out, hub.asked) == (2, "", [])
    assert (
        "error: lm-eval downloads the data of 'lm_eval:gsm8k' itself. Run the task once with a network; later runs "
        "with HF_HUB_OFFLINE=1 use the cached data. Or give --data (or KVBENCH_DATA) a folder that holds "
        "lm_eval/gsm8k.jsonl."
    ) in result.err
    assert not (tmp_path / "d").exists()


def test_an_overloaded_hub_is_asked_three_times(data: Callable, hub: Hub, tmp_path: Path) -> None:
    hub.repos["datasets/org/table"].status = 503
    hub.asked.clear()
    try:
        (result,) = data("fetch table --out d", folder=tmp_path)
    finally:
        hub.repos["datasets/org/table"].status = 200
    assert "the hub is unreachable" in result.err
    assert len(hub.asked) == 3


def test_names_and_folders_that_are_wrong(data: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    name, folder, made, missing = data(
        "fetch tabel --out d",
        "fetch table --out file",
        "check walk --json",
        "check table --data nowhere",
        folder=tmp_path,
    )
    assert (name.code, folder.code, made.code, missing.code) == (2, 2, 0, 3)
    assert "error: unknown task 'tabel'. Did you mean 'table'?" in name.err
    assert "error: --out 'file' is a file; give a folder." in folder.err
    assert json.loads(made.out)["tasks"] == [{"task": "walk", "state": "generated"}]
    assert "error: --data 'nowhere' does not exist." in missing.err
