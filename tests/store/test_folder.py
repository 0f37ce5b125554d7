"""Everything that can be wrong with a run's folder is said before any work: F25, F26 and the --out cases."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import KVBenchError, RunInUseError, SetupError, UserError
from kvbench.store import RunFolder, check_out, existing, list_runs, read_run

Start = Callable[..., RunFolder]
Filled = Callable[..., Path]
Child = Callable[..., subprocess.Popen[str]]

CONFIG = {"task": ["walk"], "method": "gkv", "budget": 256, "seed": 1, "sampling": {"temperature": 0.6}}
VERSIONS = {"kvbench_version": "0.1.0", "torch_version": "2.13.0", "transformers_version": "5.17.0"}


def message(kind: type[KVBenchError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_run_is_started_filled_and_continued(start: Start, row: Callable[..., dict[str, Any]]) -> None:
    with start(command=["kvbench", "run"]) as run:
        assert (run.name, run.planned, run.info["config"], run.notices) == ("r1", 10, CONFIG, [])
        assert run.done_keys() == set()
        with run.journal() as journal:
            journal.append(row(0))
    assert not (run.path / "lock").exists()
    with start() as run:  # the same command again
        assert run.done_keys() == {row(0)["row_key"]}
    assert run.info["command"] == ["kvbench", "run"]
    with RunFolder.resume(run.path.parent, "r1", environment=VERSIONS) as run:
        assert (run.info["config"], run.done_keys()) == (CONFIG, {row(0)["row_key"]})


def test_dropped_records_are_reported_once(filled: Filled, start: Start) -> None:
    path = filled()
    (segment,) = (path / "journal").iterdir()
    os.truncate(segment, segment.stat().st_size - 1)
    with start() as run:
        assert len(run.done_keys()) == len(run.done_keys()) == 5
        assert len(run.notices) == 1


def test_b078_out_is_a_file(tmp_path: Path, start: Start) -> None:
    file = tmp_path / "existing-file.txt"
    file.touch()
    expected = f"--out '{file}' is a file; give a folder."
    assert message(UserError, lambda: start(out=file)) == expected
    assert message(UserError, lambda: start(out=file / "below")) == expected


def test_b080_another_configuration(filled: Filled, start: Start) -> None:
    path = filled(1)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    ask = f"'{path}' holds a run with "
    text = message(UserError, lambda: start(config={**CONFIG, "budget": 512}))
    assert text == f"{ask}budget 256; you asked for 512. Give another --run-name."
    text = message(UserError, lambda: start(config={**CONFIG, "sampling": {"temperature": 1.0}, "method": "\x1b[2J"}))
    assert text == (
        f"{ask}other settings: method 'gkv', now '\\x1b[2J'; sampling.temperature 0.6, now 1.0. "
        "Give another --run-name."
    )
    text = message(UserError, lambda: start(config={"a": 1, "b": None, "c": [1], "d": "x", "e": 0}))
    assert (
        "holds a run with other settings: a default, now 1; budget 256, now default; c default, now [1]; "
        "d default, now 'x' (5 more differ)." in text
    )
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def test_b081_resuming_none(filled: Filled, tmp_path: Path) -> None:
    filled(1)
    filled(1, name="r2")
    out = tmp_path / "results"
    text = message(UserError, lambda: RunFolder.resume(out, "r9", environment=VERSIONS))
    assert text == f"no run 'r9' in {out}. Runs there: r1, r2."
    text = message(UserError, lambda: RunFolder.resume(tmp_path / "none", "r9", environment=VERSIONS))
    assert text == f"no run 'r9' in {tmp_path / 'none'}. There are no runs there."
    assert not (tmp_path / "none").exists()
    assert list_runs(out) == ["r1", "r2"]


def test_b083_a_run_in_use(start: Start) -> None:
    with start() as run:
        text = message(RunInUseError, start)
        assert text.startswith(f"run 'r1' is in use by process {os.getpid()} on host ")
        assert run.done_keys() == set()


def test_b085_links(tmp_path: Path, start: Start) -> None:
    precious = tmp_path / "etc"
    precious.mkdir()
    (precious / "passwd").write_text("root")
    (tmp_path / "link").symlink_to(precious)
    with start(out=tmp_path / "link", name="ours"):
        pass
    assert (precious / "ours" / "run.json").is_file()
    (tmp_path / "link" / "r2").symlink_to(precious)
    text = message(UserError, lambda: start(out=tmp_path / "link", name="r2"))
    assert "has files but no kvbench run (it holds 'ours')" in text
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    assert "a broken link" in message(UserError, lambda: start(out=tmp_path / "broken"))
    assert "a broken link" in message(UserError, lambda: start(out=tmp_path, name="broken"))
    assert (precious / "passwd").read_text() == "root"
    assert sorted(p.name for p in precious.iterdir()) == ["ours", "passwd", "r2"]


def test_foreign_files_are_left_alone(tmp_path: Path, start: Start) -> None:
    (tmp_path / "results" / "r1").mkdir(parents=True)
    (tmp_path / "results" / "r1" / "rows.parquet").write_text("mine")
    assert "(it holds 'rows.parquet')" in message(UserError, start)
    (tmp_path / "results" / "r2").write_text("mine")
    assert "is a file" in message(UserError, lambda: start(name="r2"))


def test_b086_no_run_to_read(tmp_path: Path) -> None:
    assert message(UserError, lambda: read_run(tmp_path)) == f"'{tmp_path}' has no kvbench run (no run.json)."
    assert "no run.json" in message(UserError, lambda: read_run(tmp_path / "none"))


def test_f25_an_edited_run_is_refused(filled: Filled, start: Start) -> None:
    path = filled(1)
    manifest = json.loads((path / "run.json").read_text())
    manifest["config"]["budget"] = 512
    (path / "run.json").write_text(json.dumps(manifest))
    for call in (lambda: start(config=manifest["config"]), lambda: read_run(path)):
        assert "was changed by hand: 'config' differs from its hash" in message(UserError, call)
    (path / "run.json").write_text("{")
    assert "is damaged" in message(SetupError, start)
    (path / "run.json").write_text(json.dumps({**manifest, "format": 7}))
    assert message(UserError, start) == (
        "run.json has format 7; this kvbench reads format 1. Read it with the kvbench that wrote it, "
        "or start a new run (kvbench run --run-name)."
    )


def test_f26_other_versions(filled: Filled, start: Start) -> None:
    filled(1)
    newer = {**VERSIONS, "torch_version": "2.14.0", "transformers_version": "5.18.0"}
    text = "run 'r1' was made with torch 2.13.0 and transformers 5.17.0; installed: 2.14.0 and 5.18.0."
    assert message(UserError, lambda: start(environment=newer)).startswith(text)
    with start(environment=newer, allow_version_change=True) as run:
        assert run.notices == [f"{text} Every row states its versions."]
        assert run.info["environment"] == VERSIONS


def test_settings_come_back_as_they_were_given(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    given = {"model": "/home/ada/m", "task_file": "token=abc/q.jsonl", "stop": ["Token: x", "~"], "data": "./secret=m"}
    for _ in range(2):  # started, then continued
        with start(config=given, command=["kvbench", "--model", "/home/ada/m"]) as run:
            assert run.info["config"] == given
    assert run.info["command"] == ["kvbench", "--model", "~/m"]  # is only shown


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("config", {"stop": ["caf\udce9"]}, r"stop '['caf\udce9']'"),
        ("config", {"model": "m" * 5000}, f"model '{'m' * 200}...'"),
        ("environment", {"data": "/data/M\udcfcller"}, r"data '/data/M\udcfcller'"),
        ("environment", {"data_variable": "a\0b"}, r"data_variable 'a\x00b'"),
        ("environment", {"tasks": {"mine": {"version": 2, "data": {}}}}, "tasks.mine.version '2'"),
    ],
)
def test_what_run_json_cannot_hold_is_refused_before_any_work(
    part: str, value: dict[str, Any], named: str, start: Start, tmp_path: Path
) -> None:
    given = {"config": CONFIG, "environment": VERSIONS}
    text = message(UserError, lambda: start(**given | {part: given[part] | value}))
    texts = "texts are UTF-8 without control characters, of at most 4096 characters each"
    need = "a text" if part == "environment" and "tasks" in value else f"a value whose {texts}"
    assert text == f"run.json cannot hold {named}. Give {need}."
    assert list((tmp_path / "results" / "r1").iterdir()) == []
    with start():  # the name is still free
        pass


def test_names_are_checked_first(tmp_path: Path, start: Start) -> None:
    assert "no '/'" in message(UserError, lambda: start(name="../x"))
    text = message(UserError, lambda: RunFolder.resume(tmp_path, "../x", environment=VERSIONS))
    assert text.startswith("--resume '../x'")
    assert list(tmp_path.iterdir()) == []


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    assert list(check_out(tmp_path / "a" / "b").iterdir()) == []


def test_a_renamed_run_is_found_and_not_resumed(tmp_path: Path) -> None:
    """Replay and score read a folder of any name; only a name that kvbench gives can be written to."""
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "run.json").write_text("{}")
    assert existing(tmp_path, "my run") == tmp_path / "my run"
    with pytest.raises(UserError, match="--resume 'my run'"):
        RunFolder.resume(tmp_path, "my run", environment={})
