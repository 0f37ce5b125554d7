"""Canary secrets in every channel; none may come out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.console.redact import (
    hide_keys,
    holds_secret,
    redact_argv,
    redact_config,
    redact_keys,
    redact_text,
)
from kvbench.store import RunFolder
from kvbench.store.manifest import plain, surroundings, value
from kvbench.store.schema import check_row

HF = "hf_" + "Ab1" * 11
OPENAI = "sk-proj-" + "x9_" * 10
CANARY = "canary-4711-canary"


@pytest.mark.parametrize(
    "text",
    [
        f"401 for token {HF}",
        f"OPENAI said {OPENAI}.",
        f"https://user:{CANARY}@hub.example/model",
        f"https://{CANARY}@hub.example/model",
        f"Authorization: Bearer {CANARY}",
        f"GET /v1?api_key={CANARY}&x=1",
        f'{{"api_key": "{CANARY}"}}',
        f"password={CANARY}",
        "AKIA" + "Z" * 16,
        "ghp_" + "q" * 36,
    ],
)
def test_secrets_in_text(text: str) -> None:
    redacted = redact_text(text)
    assert "***" in redacted
    assert not any(secret in redacted for secret in (HF, OPENAI, CANARY, "Z" * 16, "q" * 36))


@pytest.mark.parametrize(
    "text",
    [
        "meta-llama/Llama-3.1-8B",
        "a risk-averse-and-disk-like-name-of-a-model",
        "KeyError: 'budget'",
        "max_new_tokens=512",
        "method: keydiff",
        "https://huggingface.co/Qwen/Qwen3-8B",
        "ends at 12:03, mail me@example.org",
    ],
)
def test_innocent_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_home_is_shown_as_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert redact_text("/home/ada/models/x, /home/ada") == "~/models/x, ~"
    assert redact_text("/home/adam/x /srv/home/ada/x") == "/home/adam/x /srv/home/ada/x"
    monkeypatch.setenv("HOME", "/")
    assert redact_text("/srv/x") == "/srv/x"


def test_command_line() -> None:
    argv = ["kvbench", "run", "--judge-key", CANARY, f"--hub-token={CANARY}", "--max-new-tokens", "512", "--budget=256"]
    assert redact_argv(argv) == [
        *("kvbench", "run", "--judge-key", "***", "--hub-token=***", "--max-new-tokens", "512", "--budget=256")
    ]
    assert redact_argv(["--set", f"judge.api_key={CANARY}"]) == ["--set", "judge.api_key=***"]
    assert redact_argv(["--judge-key-env", "OPENAI_API_KEY"]) == ["--judge-key-env", "OPENAI_API_KEY"]
    assert redact_argv(["--judge-key-env", CANARY]) == ["--judge-key-env", "***"]
    assert redact_argv(["--token", "-" + CANARY, "x"]) == ["--token", "***", "x"]


def test_nested_settings() -> None:
    settings = {"judge": {"api_key": CANARY, "url": f"https://u:{CANARY}@h"}, "stop": ("a", HF), "key_dim": 64}
    assert redact_config(settings) == {
        "judge": {"api_key": "***", "url": "https://***@h"},
        "stop": ["a", "***"],
        "key_dim": 64,
    }


@given(st.text(max_size=80))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    """A resumed run compares redacted settings with redacted ones."""
    assert redact_text(redact_text(text)) == redact_text(text)


def test_no_canary_reaches_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", HF)
    model = f"https://me:{CANARY}@hub.example/m"
    with RunFolder.open(
        tmp_path,
        "r",
        {"model": model, "judge_key_env": CANARY},
        environment={"sources": {"api_key": HF}, "judge_token": CANARY},
        command=["kvbench", "--model", model, "--judge-key", CANARY, f"--t={HF}"],
    ) as run:
        with run.journal() as journal:
            journal.append(
                {
                    "row_key": "k",
                    "task": "walk",
                    "doc_id": "q0",
                    "sample": 0,
                    "method": "gkv",
                    "status": "judge_error",
                    "model": model,
                    "note": f"Bearer {CANARY}: {HF}",
                }
            )
        lock = (run.path / "lock").read_text()
        run.seal()
    stored = b"".join(p.read_bytes() for p in run.path.rglob("*") if p.is_file())
    for secret in (HF, CANARY):
        assert secret.encode() not in stored
        assert secret not in lock


OPTIONS = {"key_norm": "l1", "token_kind": "a b"}


def test_settings_are_never_hidden_by_name() -> None:
    """Rows and records of two settings would look alike."""
    grids = [{"methods": [{"name": "m", "options": OPTIONS}], "budgets": [], "tasks": ["walk"], "limit": None}]
    assert plain({"grids": grids, "secret_name": "x"}) == {"grids": grids, "secret_name": "x"}
    label = "m(key_norm=l1, token_kind=a b)"
    assert surroundings({"methods": [{"method": label}]})["methods"] == [{"method": label}]
    assert "key_norm=l1" in value(grids)
    row = check_row(
        {
            "row_key": "k",
            "task": "walk",
            "doc_id": "q0",
            "sample": 0,
            "method": "m",
            "status": "ok",
            "model": "/m/key=a",
            "stop": ["token: x"],
            "options": OPTIONS,
            "artefacts": {"secret": "a", "u": f"https://u:{CANARY}@h", "k": HF},
        }
    )
    assert (row["model"], row["stop"]) == ("/m/key=a", '["token: x"]')
    assert row["options"] == '{"key_norm":"l1","token_kind":"a b"}'
    assert row["artefacts"] == '{"k":"***","secret":"a","u":"***"}'


def test_values_of_secret_variables_are_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "Zx9-opaque-secret-77")
    monkeypatch.setenv("MY_KEY_HOLDER", "my_api_key_2")
    monkeypatch.setenv("my_api_key_2", "x")
    monkeypatch.setenv("MY_KEY_SERVER", "https://keys.example.org")
    assert holds_secret({"stop": ("a", "say Zx9-opaque-secret-77.")})
    assert not holds_secret(["my_api_key_2", "https://keys.example.org/v1", "Zx9"])
    assert hide_keys("say Zx9-opaque-secret-77.") == "say ***."


def test_a_message_of_our_own_keeps_names() -> None:
    line = "kvbench run --resume r --task-file token=abc/q.jsonl"
    assert hide_keys(f"{line} --stop {HF}") == f"{line} --stop ***"
    assert redact_keys(line).endswith("token=***")
