"""Stored answers scored again: nothing is generated, the last score counts, foreign prompts are left alone."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import pytest
from kvbench.tasks.file import FileTask

from kvbench.cli.app import main
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import SetupError
from kvbench.runner import run_plan
from kvbench.runner.execute import execute
from kvbench.store import journal, read_run
from kvbench.store.reading import read_texts
from kvbench.task import Score
from kvbench.taskkit.synthetic_task import SyntheticTask

REAL = SyntheticTask.score


def config(limit: int = 3) -> RunConfig:
    grid = Grid(methods=(MethodChoice(name="full"), MethodChoice(name="gkv")), budgets=(48,), tasks=("chain",))
    return RunConfig(grids=(grid,), interval=32, limit=limit)


def no_engine(*_: object, **__: object) -> None:
    raise AssertionError("weights were loaded")


def broken(self, doc, output):
    raise RuntimeError("the grader is broken")


@pytest.fixture
def ungraded(tmp_path, monkeypatch) -> Path:
    """A run whose grader failed on every row."""
    monkeypatch.setattr(SyntheticTask, "score", broken)
    result = execute(config(), out=tmp_path, run_name="r1")
    monkeypatch.setattr(SyntheticTask, "score", REAL)
    assert dict(result.failed) == {"grader_error": 6}
    return result.run_dir


def test_after_a_full_disk_the_answers_are_scored_again(ungraded, monkeypatch, capsys):
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(journal, "_datasync", full)
        assert main(["score", str(ungraded)]) == 3
    assert "(no space left on device): 6 rows are saved. Free space, then score again." in capsys.readouterr().err
    assert main(["score", str(ungraded), "-q"]) == 0


def test_a_resumed_run_scores_what_a_grader_left_without_generating(ungraded, monkeypatch):
    before = read_run(ungraded).rows
    assert set(before["status"]) == {"grader_error"}
    assert before["score"].isna().all()
    assert before["note"].str.contains("the grader is broken").all()
    monkeypatch.setattr(run_plan, "load", no_engine)
    again = execute(config(), out=ungraded.parent, run_name="r1", resume=True)
    after = read_run(ungraded).rows
    assert not again.failed
    assert set(after["status"]) == {"ok"}
    assert set(after["score_pass"]) == {1}
    assert after["note"].isna().all()
    assert list(after["output_sha256"]) == list(before["output_sha256"])
    assert list(after["row_key"]) == list(before["row_key"])


def test_the_score_command_gives_the_scores_of_an_undisturbed_run(ungraded, tmp_path, capsys, monkeypatch):
    execute(config(), out=tmp_path, run_name="good")
    monkeypatch.setattr(run_plan, "load", no_engine)
    assert main(["score", str(ungraded), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["scored"], document["failed"], document["strangers"]) == (6, {}, 0)
    scores = [read_run(tmp_path / name).rows[["doc_id", "method", "score", "score_partial"]] for name in ("r1", "good")]
    assert scores[0].equals(scores[1])
    texts = [read_texts(tmp_path / name)["output"].tolist() for name in ("r1", "good")]
    assert texts[0] == texts[1]


def test_all_scores_everything_again_and_the_last_score_counts(tmp_path, capsys, monkeypatch):
    result = execute(config(), out=tmp_path, run_name="r1")
    assert main(["score", str(result.run_dir), "-q"]) == 0
    assert set(read_run(result.run_dir).rows["score_pass"]) == {0}  # nothing was left to score
    for score_pass, value in enumerate((0.25, 0.75), start=1):
        monkeypatch.setattr(SyntheticTask, "score", lambda self, doc, output, v=value: Score(value=v, partial=v))
        assert main(["score", str(result.run_dir), "--all", "-q"]) == 0
        rows = read_run(result.run_dir).rows
        assert set(rows["score"]) == {value}
        assert set(rows["score_pass"]) == {score_pass}
        assert len(rows) == 6


def test_a_new_failure_takes_no_score_away_and_says_so(tmp_path, monkeypatch, capsys):
    result = execute(config(), out=tmp_path, run_name="r1")
    before = read_run(result.run_dir).rows
    monkeypatch.setattr(SyntheticTask, "score", broken)
    assert main(["score", str(result.run_dir), "--all", "-q"]) == 4
    assert "6 grader_error" in capsys.readouterr().err
    assert list(read_run(result.run_dir).rows["score"]) == list(before["score"])


def test_an_answer_to_another_prompt_is_not_scored(tmp_path, monkeypatch, capsys):
    result = execute(config(), out=tmp_path, run_name="r1")
    docs = SyntheticTask.docs

    def other(self, source, *, style="default", limit=None):
        return docs(self, source, style=style, limit=limit + 1)[1:]  # the last is new, the first is gone

    monkeypatch.setattr(SyntheticTask, "docs", other)
    assert main(["score", str(result.run_dir), "--all", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["scored"], document["strangers"]) == (4, 2)


def test_who_refuses_us_ends_the_run_with_its_answers_saved(tmp_path, monkeypatch):
    def refuse(self, doc, output):
        raise SetupError("the judge refused the key in OPENAI_API_KEY (HTTP status 401).")

    monkeypatch.setattr(SyntheticTask, "cheap_score", False)
    monkeypatch.setattr(SyntheticTask, "score", refuse)
    monkeypatch.setattr(SyntheticTask, "needs", frozenset({"judge"}))
    monkeypatch.setattr("kvbench.scoring.judge.check", lambda services, task: None)
    with pytest.raises(SetupError, match="refused the key"):
        execute(config(), out=tmp_path, run_name="r1")
    rows = read_run(tmp_path / "r1").rows
    assert len(rows) >= 1
    assert set(rows["status"]) == {"unscored"}
    monkeypatch.setattr(SyntheticTask, "score", REAL)
    assert not execute(config(), out=tmp_path, run_name="r1", resume=True).failed
    assert set(read_run(tmp_path / "r1").rows["status"]) == {"ok"}


def test_keys_are_not_taken_from_the_command_line(capsys):
    assert main(["score", "r1", "--judge-key", "sk-verysecret"]) == 2
    error = capsys.readouterr().err
    assert "keys are not taken from the command line" in error
    assert "verysecret" not in error


def test_what_is_said_to_try_again_works_as_printed(tmp_path, monkeypatch, capsys):
    (tmp_path / "q.jsonl").write_text('{"id": "a", "question": "1+1?", "answer": 2}\n')
    given = ["--task-file", str(tmp_path / "q.jsonl")]
    run = ["run", "--method", "full", *given, "--max-new-tokens", "8", "--out", str(tmp_path), "--run-name", "r1", "-q"]
    assert main(run) == 0
    monkeypatch.setattr(FileTask, "cheap_score", True)  # scored here, where it is broken
    monkeypatch.setattr(FileTask, "score", broken)
    assert main(["score", str(tmp_path / "r1"), "--all", *given, "-q"]) == 4
    command = capsys.readouterr().err.partition("; '")[2].partition("' tries them again")[0]
    assert command == shlex.join(["kvbench", "score", str(tmp_path / "r1"), *given])
    monkeypatch.undo()
    assert main([*shlex.split(command)[1:], "-q"]) == 0


def test_a_run_is_named_from_inside_its_folder(tmp_path, monkeypatch, capsys):
    result = execute(config(1), out=tmp_path, run_name="r1")
    monkeypatch.chdir(result.run_dir)
    assert main(["score", ".", "--all", "-q"]) == 0
    (result.run_dir / "rows.parquet").write_bytes(b"PAR1")
    (result.run_dir / "journal").rename(tmp_path / "journal")
    capsys.readouterr()
    assert main(["report", "."]) != 0
    error = capsys.readouterr().err
    assert "r1" in error
    assert "''" not in error


def test_a_folder_that_is_no_run_name_is_not_blamed_on_resume(tmp_path, capsys):
    result = execute(config(1), out=tmp_path, run_name="r1")
    result.run_dir.rename(tmp_path / "r1 (copy)")
    capsys.readouterr()
    assert main(["score", str(tmp_path / "r1 (copy)")]) == 2
    error = capsys.readouterr().err
    assert "run 'r1 (copy)': only letters" in error
    assert "--resume" not in error
