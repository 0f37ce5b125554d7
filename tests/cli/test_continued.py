"""A run that goes on: what its user gives again, what is checked by hash, and settings that come back as they were."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.hostile_run import PLUGIN, edit
from support.judges import say, send, serve

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.cli.continued import continued
from kvbench.config.layers import Gathered
from kvbench.errors import SetupError
from kvbench.scoring import sandbox
from kvbench.sources.data import source
from kvbench.sources.data.location import in_folder
from kvbench.sources.data.source import BUNDLED
from kvbench.store import read_rows
from kvbench.taskkit.synthetic_task import SyntheticTask

__all__ = ["serve"]
SMALL = ["--budget", "32", "--interval", "8", "--limit", "1", "--max-new-tokens", "12", "-q"]
WALK = [*SMALL, "--task", "walk/orbit-100"]
STOPS = ["--stop", "Token: x", "--stop", "~", "--stop", "secret=a b"]
HF = "hf_" + "Ab1" * 11
REPLAY = ["replay", "--run", "r1", "--limit", "2", "--out", "rout", "--analysis", "overlap", "-q"]
SESSION: dict[str, tuple[list[str], dict[str, str]]] = {
    "plugin": (["run", "--plugin", "evil.py", "--method", "full,evil", *WALK, *STOPS, "--run-name", "r1"], {}),
    "plugin again": (["run", "--resume", "r1", "-q"], {}),
    "plugin score": (["score", "r1", "--all", "-q"], {}),
    "plugin replay": (REPLAY, {}),
    "plugin flags": (["run", "--resume", "r1", "--dry-run", "--allow-version-change", "--config", "free.toml"], {}),
    "plugin replay variable": (
        ["replay", "--run", "r1", "--method", "evil", "--budget", "8", "--interval", "4", "-q", "--json"],
        {"KVBENCH_PLUGIN": "evil.py"},
    ),
    "plugin given": (["run", "--resume", "r1", "-q", "--json", "--plugin", "evil.py"], {}),
    "plugin variable": (["run", "--resume", "r1", "-q", "--json"], {"KVBENCH_PLUGIN": "evil.py"}),
    "plugin config": (["run", "--resume", "r1", "-q", "--json", "--config", "again.toml"], {}),
    "plugin changed": (["run", "--resume", "r1", "-q", "--plugin", "changed/evil.py"], {}),
    "plugin more": (["run", "--resume", "r1", "-q", "--plugin", "evil.py", "--plugin", "changed/evil.py"], {}),
    "file": (
        [
            *("run", "--task-file", "token=abc/q.jsonl", "--chat-template", "t.jinja", "--model", "./secret=models"),
            *("--method", "full,knorm", "--run-name", "r2", *SMALL),
        ],
        {},
    ),
    "file again": (["run", "--resume", "r2", "-q"], {}),
    "file given": (["run", "--resume", "r2", "-q", "--json", "--task-file", "token=abc/q.jsonl"], {}),
    "file moved": (["score", "r2", "--all", "--json", "--task-file", "moved/q.jsonl"], {}),
    "file changed": (["run", "--resume", "r2", "-q", "--task-file", "changed/q.jsonl"], {}),
    "file renamed": (["run", "--resume", "r2", "-q", "--task-file", "moved/other.jsonl"], {}),
    "none": (["run", "--resume", "r3", "-q", "--task-file", "token=abc/q.jsonl"], {}),
    "template changed": (["run", "--resume", "r4", "-q", "--task-file", "token=abc/q.jsonl"], {}),
    "template scored": (["score", "r4", "--all", "-q", "--task-file", "token=abc/q.jsonl"], {}),
    "template piped": (["run", "--resume", "r5", "--dry-run", "--task-file", "token=abc/q.jsonl"], {}),
    "file planned": (["run", "--resume", "r2", "--dry-run", "--task-file", "changed/q.jsonl"], {}),
    "key": (["run", "--method", "full", *WALK, "--stop", HF, "--run-name", "key"], {}),
    "key in a file": (["run", "--config", "key.toml", "--run-name", "key"], {}),
    "key in a variable": (["run", "--method", "full", *WALK, "--run-name", "key"], {"KVBENCH_DATA_REVISION": HF}),
    "password": (["run", "--method", "full", *WALK, "--model", "https://me:word@h/m", "--run-name", "key"], {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("continued")
    for name in ("moved", "changed", "token=abc"):
        (path / name).mkdir()
    question = '{"id": "a", "question": "1+1?", "answer": 2}\n'
    for name in ("token=abc/q.jsonl", "moved/q.jsonl", "moved/other.jsonl"):
        (path / name).write_text(question)
    (path / "changed" / "q.jsonl").write_text(question.replace("1+1", "1+2"))
    (path / "evil.py").write_text(PLUGIN)
    (path / "changed" / "evil.py").write_text(PLUGIN + "# changed\n")
    (path / "again.toml").write_text('plugin = "evil.py"\n')
    (path / "free.toml").write_text("keep_prompts = true\n")
    (path / "key.toml").write_text(f'method = "full"\ntask = "walk/orbit-100"\nstop = ["a", "{HF}"]\n')
    (path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shutil.copytree(tiny.path(), path / "secret=models", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return path


@pytest.fixture(scope="module")
def session(calls: Callable, folder: Path) -> dict:
    names = list(SESSION)
    later = names.index("file given")
    results = dict(zip(names, calls(folder, [SESSION[name] for name in names[:later]])))
    runs = folder / "results"
    for name in ("r3", "r4", "r5"):
        shutil.copytree(runs / ("r1" if name == "r3" else "r2"), runs / name)
    edit(runs / "r3", lambda r: r["environment"].update(plugin=[], plugins=[]))
    edit(runs / "r4", lambda r: r["environment"]["chat_template"].update(sha256="0" * 64))
    os.mkfifo(folder / "pipe.jinja")  # opening it would wait for a writer
    edit(runs / "r5", lambda r: r["config"].update(chat_template=str(folder / "pipe.jinja")))
    return results | dict(zip(names[later:], calls(folder, [SESSION[name] for name in names[later:]])))


def test_show_names_what_a_run_used(session: dict, calls: Callable, folder: Path) -> None:
    """Command, plug-ins and judge, without keys and without the folders that they lie in."""
    runs = folder / "results"
    shutil.copytree(runs / "r1", runs / "told")
    judge = {"judge": "https://me:word@host/v1", "judge_model": "grader-1"}
    edit(runs / "told", lambda r: r["environment"].update(judge, git="0123456789ab"))
    edit(runs / "told", lambda r: r["command"].extend(["--judge-key", "hunter22"]))
    shown, plain, document = calls(folder, [(f"show {line}".split(), {}) for line in ("told", "r2", "told --json")])
    shutil.rmtree(runs / "told")
    assert shown.code == 0, shown.err
    lines = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert lines["command"].startswith("kvbench run --plugin evil.py --method full,evil --budget 32 ")
    assert lines["command"].endswith(" --judge-key '***'")
    assert lines["plug-ins"] == "evil.py"
    assert lines["judge"] == "https://***@host/v1 grader-1"
    assert lines["kvbench"] == "commit 0123456789ab"
    assert "\ngrid 1 " in shown.out
    assert not any(secret in shown.out + document.out for secret in ("hunter22", "me:word"))
    assert json.loads(document.out)["command"][:2] == ["kvbench", "run"]
    assert not any(line.startswith(("plug-ins", "judge")) for line in plain.out.splitlines())


@pytest.mark.parametrize("case", ["plugin", "file"])
def test_runs_begin(session: dict, case: str) -> None:
    assert session[case].code == 0, session[case].err


@pytest.mark.parametrize(
    ("case", "command"),
    [
        ("plugin again", "kvbench run --resume r1 -q --plugin {}/evil.py"),
        ("plugin score", "kvbench score r1 --all -q --plugin {}/evil.py"),
        ("plugin replay", f"kvbench {' '.join(REPLAY)} --plugin {{}}/evil.py"),
        (
            "plugin flags",
            "kvbench run --resume r1 --dry-run --allow-version-change --config free.toml --plugin {}/evil.py",
        ),
        ("file again", "kvbench run --resume r2 -q --task-file token=abc/q.jsonl"),
    ],
)
def test_what_runs_code_is_given_again(session: dict, folder: Path, case: str, command: str) -> None:
    """The line is what was typed, with all its flags, and what it lacks."""
    assert session[case].code == 2
    (line,) = session[case].err.splitlines()
    assert line.endswith(f"If you trust it, give it again: {command.format(folder)}")


def test_the_printed_plan_stays_a_plan(session: dict, folder: Path, kvbench: Callable) -> None:
    typed = shlex.split(session["plugin flags"].err.partition("give it again: kvbench ")[2])
    result = kvbench(*typed, cwd=folder)
    assert result.code == 0, result.err
    assert "nothing was run" in result.out


def test_replay_takes_the_plugin_from_a_variable(session: dict) -> None:
    result = session["plugin replay variable"]
    assert result.code == 0, result.err
    assert "evil" in {row["method"] for row in json.loads(result.out)["rows"]}


@pytest.mark.parametrize("case", ["plugin given", "plugin variable", "plugin config", "file given"])
def test_a_run_goes_on_with_the_very_rows(session: dict, folder: Path, case: str) -> None:
    """Stop strings with 'Token: x' and '~', a model folder 'secret=models' and a path 'token=abc' come back whole."""
    assert session[case].code == 0, session[case].err
    document = json.loads(session[case].out.splitlines()[-1])
    assert document["rows_done"] == document["rows_planned"] > 0
    assert len(read_rows(folder / document["run"])) == document["rows_planned"]


def test_a_moved_file_is_the_same_file(session: dict) -> None:
    assert session["file moved"].code == 0, session["file moved"].err
    assert json.loads(session["file moved"].out.splitlines()[-1])["strangers"] == 0


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("plugin changed", "is none of the plug-ins that run 'r1' began with (evil.py "),
        ("plugin more", "--plugin 'changed/evil.py' ("),
        ("file changed", "is not the file that run 'r2' began with"),
        ("file renamed", "holds task 'file/other', but run 'r2' has only file/q."),
        ("none", "--task-file 'token=abc/q.jsonl': the run has no task from a file."),
        ("template changed", "--chat-template 't.jinja' ("),
        ("template scored", "is not the file that run 'r4' began with (sha256 000000000000)."),
        ("template piped", "is a pipe"),
        ("file planned", "is not the file that run 'r2' began with"),
        ("key", "--stop looks like a key"),
        ("key in a file", "key.toml:3: 'stop' looks like a key"),
        ("key in a variable", "environment variable KVBENCH_DATA_REVISION looks like a key"),
        ("password", "--model looks like a key, or an address with a password"),
    ],
)
def test_what_is_refused(session: dict, folder: Path, case: str, text: str) -> None:
    result = session[case]
    assert result.code == 2
    assert text in result.err
    assert HF not in result.err
    assert "me:word" not in result.err
    assert len(result.err.splitlines()) <= 2
    assert not (folder / "results" / "key").exists()
    assert not list((folder / "changed").glob("*.ran"))


def test_settings_are_stored_as_given_and_shown_redacted(session: dict, folder: Path, kvbench: Callable) -> None:
    record = json.loads((folder / "results" / "r1" / "run.json").read_text())
    assert record["config"]["stop"] == ["Token: x", "~", "secret=a b"]
    assert "Token: x" not in json.dumps([record["command"], record["environment"]["sources"]])
    shown = kvbench("show", "r1", cwd=folder)
    assert shown.code == 0
    assert "Token: ***" in shown.out


def test_a_folder_names_no_judge_and_no_key(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A judge, an address and a variable that somebody wrote into run.json."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-4711")
    run = ["run", "--method", "full", "--task", "mt_bench", "--limit", "1", "--max-new-tokens", "8", "-q"]
    assert main([*run, "--judge", "none", "--out", str(tmp_path), "--run-name", "r1"]) == 0
    server = serve(say("[[5]]"))
    judge = {"judge": server.url, "judge_model": "m", "judge_key_env": "AWS_SECRET_ACCESS_KEY"}
    edit(tmp_path / "r1", lambda record: record["environment"].update(judge))
    capsys.readouterr()
    for command in (["score", "r1"], ["score", "r1", "--all"], ["run", "--resume", "r1"]):
        assert main([*command, "--out", str(tmp_path), "-q"]) == 2
        assert "--judge-key-env AWS_SECRET_ACCESS_KEY" in capsys.readouterr().err
    assert server.got == []
    other = serve(say("[[10]]"))
    given = ["--judge", other.url, "--judge-model", "m", "--judge-key-env", "JUDGE_KEY"]
    assert main(["score", "r1", "--out", str(tmp_path), "-q", *given]) == 0
    assert (len(server.got), len(other.got)) == (0, 2)


def test_the_printed_command_names_the_judge(serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run says to continue with works as it is printed."""
    server = serve(send(401), say("[[5]]"))
    judge = ["--judge", server.url, "--judge-model", "m", "--judge-key-env", "JUDGE_KEY"]
    run = ["run", "--method", "full", "--task", "mt_bench", "--limit", "1", "--max-new-tokens", "8", "-q", *judge]
    assert main([*run, "--out", str(tmp_path), "--run-name", "r1"]) == 3
    from kvbench.store import resume_command

    command = resume_command(tmp_path / "r1")
    assert command == f"kvbench run --resume r1 --out {tmp_path} " + " ".join(judge)
    assert main([*command.split()[1:], "-q"]) == 0


def test_the_printed_command_has_the_settings_in_force(serve, tmp_path: Path, capsys) -> None:
    """A judge, data and device that the run did not begin with."""
    run = ["run", "--method", "full", "--task", "mt_bench", "--limit", "1", "--max-new-tokens", "8", "--judge", "none"]
    out = ["--out", str(tmp_path), "-q"]
    assert main([*run, *out, "--run-name", "r1"]) == 0
    shutil.copytree(BUNDLED / "mt_bench", tmp_path / "data" / "mt_bench")
    new = [*("--judge", serve(say("no rating")).url, "--judge-model", "m", "--judge-key-env", "JUDGE_KEY")]
    new = [*new, "--device", "cpu", "--data", str(tmp_path / "data")]
    for command in (["run", "--resume", "r1", *new], ["score", "r1", *(new[:6] + new[8:])]):
        capsys.readouterr()
        assert main([*command, *out]) == 4
        printed = capsys.readouterr().err.partition("'kvbench ")[2].partition("'")[0]
        assert set(command) - {"r1"} <= set(printed.split()), printed


def test_the_same_data_from_another_place_continue_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run began with a file of the hub's cache, whose commit is a part of the keys of rows."""
    shutil.copytree(BUNDLED / "mt_bench", tmp_path / "data" / "mt_bench")
    common = ["--data", str(tmp_path / "data"), "--judge", "none", "--out", str(tmp_path), "-q"]
    run = ["run", "--method", "full", "--task", "mt_bench", "--limit", "1", "--max-new-tokens", "8", *common]
    with monkeypatch.context() as patch:
        patch.setattr(source, "in_folder", lambda *where: replace(in_folder(*where), source="hub", revision="1" * 40))
        assert main([*run, "--run-name", "r1"]) == 0
    before = read_rows(tmp_path / "r1")
    assert main(["run", "--resume", "r1", *common]) == 0
    assert main(["score", "r1", *common]) == 4  # there is no judge
    assert read_rows(tmp_path / "r1").equals(before)


@pytest.mark.parametrize(
    "grids",
    [
        [],
        [{"methods": [{"name": "gkv", "options": {"window": "8"}}], "budgets": [32], "tasks": ["walk/orbit-100"]}],
        [{"methods": [{"name": "gkv", "options": {}}], "budgets": [], "tasks": ["walk/orbit-100"]}],
    ],
)
def test_grids_that_no_run_has_are_damage(session: dict, folder: Path, tmp_path: Path, grids: list) -> None:
    """A record with right hashes: nothing to run is not a finished run, and "8" is not 8."""
    shutil.copytree(folder / "results" / "r3", tmp_path / "r1")
    edit(tmp_path / "r1", lambda record: record["config"].update(grids=grids))
    with pytest.raises(SetupError, match=r"run.json' is damaged"):
        continued(tmp_path, "r1", Gathered([], {}, {}))


def test_a_run_without_a_sandbox_goes_on_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """--unsafe-run-code is neither taken from the record nor asked for again."""
    asked: list[bool] = []
    monkeypatch.setattr(SyntheticTask, "needs", frozenset({"code"}))
    monkeypatch.setattr(sandbox, "require", lambda unsafe=False: asked.append(unsafe))
    run = ["run", "--method", "full,knorm", *WALK, "--out", str(tmp_path)]
    assert main([*run, "--run-name", "r1", "--unsafe-run-code"]) == 0
    assert json.loads((tmp_path / "r1" / "run.json").read_text())["environment"]["unsafe_run_code"] is True
    assert set(asked) == {True}
    for command in (["run", "--resume", "r1"], ["score", "r1", "--all"]):
        asked.clear()
        assert main([*command, "--out", str(tmp_path), "-q"]) == 0, capsys.readouterr().err
        assert set(asked) == {False}
