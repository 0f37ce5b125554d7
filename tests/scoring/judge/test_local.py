"""A judge in a folder: the built-in model, which has no opinion, but answers the same each time."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.errors import SetupError
from kvbench.scoring.judge import JudgeError
from kvbench.scoring.judge.local import LocalJudge


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path(), tmp_path / "judge-7b"))


def test_greedy_and_named(folder: Path):
    judge = LocalJudge(folder)
    reply = judge.ask("You are a judge.", "Rate this.", max_tokens=8)
    assert reply.model == "local:judge-7b"
    assert isinstance(reply.text, str)
    assert judge.ask("You are a judge.", "Rate this.", max_tokens=8) == reply
    assert LocalJudge(folder).ask("You are a judge.", "Rate this.", max_tokens=8) == reply


def test_threads_take_turns(folder: Path):
    judge = LocalJudge(folder)
    questions = [f"Rate {i}." for i in range(6)]
    alone = [judge.ask("", q, max_tokens=4) for q in questions]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda q: judge.ask("", q, max_tokens=4), questions)) == alone


def test_loaded_when_first_asked(folder: Path):
    judge = LocalJudge(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=r"the judge .*judge-7b' cannot be loaded"):
        judge.ask("", "")


def test_a_template_that_refuses(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(SetupError, match=r"chat template of the judge .* fails: 'no system message'"):
        LocalJudge(folder).ask("", "")


def test_a_question_beyond_its_context(folder: Path):
    with pytest.raises(JudgeError, match="but the judge's context holds only "):
        LocalJudge(folder).ask("", "x " * 40_000)
