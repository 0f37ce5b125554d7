"""Text of exceptions that others raised reaches terminal and rows without keys: plug-ins, graders, libraries, bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.audit.outcome import in_one_line
from kvbench.cli import app as cli
from kvbench.console import terminal
from kvbench.console.redact import redact_keys

KEY = "sk-proj-ABCDEFGHIJKLMNOP1234"
OWN = "zq9-not-of-any-known-shape"  # a secret that only its variable's name gives away
TEXT = f"cannot open https://me:{KEY}@host/x: password=hunter22, {OWN}"
HIDDEN = (KEY, OWN, "hunter22")
PLUGIN = f"""
from dataclasses import dataclass
from kvbench.eviction.api import Method
from kvbench.registry import methods, tasks
from kvbench.scoring.boxed import last_box
from kvbench.tasks.walk import Walk

@methods.register("leaky")
@dataclass(frozen=True)
class Leaky(Method):
    def score(self, view):
        raise RuntimeError({TEXT!r})

@tasks.register("leaky")
class LeakyTask(Walk):
    def score(self, doc, output):
        raise RuntimeError({TEXT!r})
"""
RUN = "--limit 1 --samples 1 --interval 8 --max-new-tokens 24 -q"
LINES = {
    "import": "list methods --plugin import.py",
    "method": f"run --plugin leaky.py --method leaky --budget 32 --task walk/orbit-100 {RUN} --run-name method",
    "grader": f"run --plugin leaky.py --method full --task leaky {RUN} --run-name grader",
    "audit": "audit leaky --plugin leaky.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leaks")
    (path / "leaky.py").write_text(PLUGIN)
    (path / "import.py").write_text(f"raise RuntimeError({TEXT!r})\n")
    return path


@pytest.fixture(scope="module")
def outcomes(calls: Callable, folder: Path) -> dict:
    secret = {"SERVICE_API_KEY": OWN}
    return dict(zip(LINES, calls(folder, [(line.split(), secret) for line in LINES.values()])))


@pytest.mark.parametrize("name", LINES)
def test_no_key_is_shown(outcomes: dict, name: str) -> None:
    result = outcomes[name]
    assert result.code != 0
    assert "cannot open" in result.out + result.err or name == "grader"
    assert not any(secret in result.out + result.err for secret in HIDDEN)


def test_no_key_is_stored(outcomes: dict, folder: Path) -> None:
    kept = [path for path in (folder / "results").rglob("*") if path.is_file()]
    assert kept
    assert not any(secret.encode() in path.read_bytes() for path in kept for secret in HIDDEN)


def test_a_bug_s_text_is_hidden_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from kvbench.cli.commands import list as list_command

    def broken() -> None:
        raise ZeroDivisionError(TEXT)

    monkeypatch.setenv("SERVICE_API_KEY", OWN)
    monkeypatch.setattr(list_command, "_models", broken)
    assert cli.main(["list", "models"]) == 1
    said = capsys.readouterr().err
    assert "cannot open https://***@host/x: password=***, ***" in said
    terminal.note(TEXT)
    terminal.warning(TEXT)
    said += capsys.readouterr().err
    assert not any(secret in said for secret in HIDDEN)


def test_an_audit_s_reason_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", OWN)
    assert not any(secret in in_one_line(RuntimeError(TEXT)) for secret in HIDDEN)


@pytest.mark.parametrize(
    "text",
    [
        "unknown key 'buget'. Did you mean 'budget'?",
        "--max-new-tokens must be 1 or more; got 0.",
        "the tokenizer has 600 tokens and the model 512 embeddings",
        "cannot write in '/home/me/results' (read-only file system)",
        "pass --judge-key-env NAME.",
        "method 'keydiff' needs --budget",
    ],
)
def test_what_is_no_secret_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY_ENV", "OPENAI_API_KEY")
    monkeypatch.setenv("KEYBOARD", "standard")
    monkeypatch.setenv("SSL_KEY_FILE", "/home/me/results")
    assert redact_keys(text) == text
