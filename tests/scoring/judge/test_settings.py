"""Settings that cannot work are found before any work; keys are never shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.errors import SetupError, UserError
from kvbench.scoring.judge import check, connect, settings
from kvbench.scoring.judge.endpoint import Endpoint
from kvbench.scoring.judge.local import LocalJudge
from kvbench.task import Services
from kvbench.taskkit.names import get_task

URL = "https://judge.example/v1"
KEY = "sk-canary0123456789abcdefXYZ"
MT_BENCH = get_task("mt_bench")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_judges", {})
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("EMPTY_KEY", "  ")
    for name in ("OPENAI_API_KEY", "NO_KEY"):
        monkeypatch.delenv(name, raising=False)


def services(judge: str | None = URL, model: str | None = "judge-1", key_env: str = "JUDGE_KEY") -> Services:
    return Services(judge=judge, judge_model=model, judge_key_env=key_env)


@pytest.mark.parametrize(
    "good",
    [
        services("none", None),
        services("NONE", None, "NO_KEY"),
        services(),
        services("https://judge.example:8443"),
        services("http://127.0.0.1:8000/v1"),
        services("http://127.8.9.1/v1", key_env="OPENAI_API_KEY"),  # a server of one's own may do without a key
        services("http://[::1]:8000/v1", key_env="OPENAI_API_KEY"),
        services("http://localhost:8000/v1"),
    ],
)
def test_settings_that_work(good: Services):
    check(good, MT_BENCH)
    assert (connect(good) is None) is (good.judge.lower() == "none")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (services(None), r"task 'mt_bench' needs a judge: --judge URL .* --judge none to store answers only\.$"),
        (services(model=None), "needs --judge-model NAME"),
        (services("gpt-4"), "--judge 'gpt-4' is not an address"),
        (services(""), "is not an address"),
        (services("ftp://judge.example"), "is not an address"),
        (services("https://"), "is not an address"),
        (services("https://[::1"), "is not an address"),
        (services("https://judge.example:99999"), "is not an address"),
        (services("https://judge.example/v 1"), "is not an address"),
        (services("https://judge.example/\x1b[2J"), r"\\x1b"),
        (services("http://judge.example/v1"), "unencrypted; give an address that begins with https://"),
        (services("http://localhost.example/v1"), "unencrypted"),
        (services("http://127.0.0.1.example/v1"), "unencrypted"),
        (services(f"https://user:{KEY}@judge.example"), "keys are not taken from the command line"),
        (services(f"http://{KEY}@127.0.0.1"), "keys are not taken from the command line"),
        (services(f"https://judge.example/v1?api-key={KEY}"), r"without '\?' and '#'"),
        (services(f"https://judge.example/v1#{KEY}"), r"without '\?' and '#'"),
        (services(KEY), "is not an address"),
        (services(key_env="NO_KEY"), "the environment variable 'NO_KEY' is empty; it must hold the judge's key"),
        (services(key_env="EMPTY_KEY"), "the environment variable 'EMPTY_KEY' is empty"),
        (services("http://localhost:8000/v1", key_env="NO_KEY"), "the environment variable 'NO_KEY' is empty"),
        (services(key_env=KEY), "keys are not taken from the command line .* --judge-key-env NAME"),
        (services(key_env="hf_abcdefghijklmnopqrstuvwx"), "keys are not taken from the command line"),
        (services(key_env=""), "keys are not taken from the command line"),
    ],
)
def test_settings_that_cannot_work(bad: Services, message: str):
    with pytest.raises(UserError, match=message) as error:
        check(bad, MT_BENCH)
    assert "canary" not in str(error.value)
    assert "abcdefghij" not in str(error.value)
    assert error.value.exit_code == 2
    if bad.judge is not None:
        with pytest.raises(UserError, match=message):
            connect(bad)


@pytest.mark.parametrize("key", ["two words and more", "line\nbreak", "schlüssel-0123456789"])
def test_a_key_that_no_header_can_hold(key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(UserError, match="the key in the environment variable 'JUDGE_KEY' has characters") as error:
        check(services(), MT_BENCH)
    assert key not in str(error.value)


def test_the_task_is_named():
    with pytest.raises(UserError, match="task 'mt_bench' needs a judge"):
        check(services(None), MT_BENCH)


def test_one_judge_for_the_same_settings():
    first = connect(services())
    assert connect(services()) is first
    assert connect(services(model="judge-2")) is not first
    assert first == Endpoint(url=URL, model="judge-1", key_env="JUDGE_KEY", through_proxy=True)
    here = connect(services("http://127.0.0.1:1/v1"))
    assert isinstance(here, Endpoint)
    assert not here.through_proxy
    assert KEY not in repr(vars(settings))


def test_a_folder_needs_a_model_and_a_template(tmp_path: Path):
    local = services(f"local:{tmp_path}", None, "NO_KEY")
    with pytest.raises(SetupError, match=r"no model in that folder \(no config\.json\)"):
        check(local, MT_BENCH)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no chat template"):
        check(local, MT_BENCH)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    check(local, MT_BENCH)
    assert isinstance(connect(local), LocalJudge)
    with pytest.raises(UserError, match="'mmdu' sends images to the judge, and a local judge reads none; give"):
        check(local, get_task("mmdu"))
