"""Errors of a library that discarded the exception of a signal: the command was interrupted."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from kvbench.cli.app import main
from kvbench.console import signals
from kvbench.errors import Interrupted, SetupError
from kvbench.registry import Registry

HALF_IMPORTED = RecursionError("too deep")  # as numpy fails if a signal came while torch imported it


def fail_after_a_signal(error: Exception) -> None:
    with suppress(signals.Signalled):
        signal.raise_signal(signal.SIGINT)
    raise error


def test_an_error_after_a_discarded_signal_is_an_interruption() -> None:
    with (
        signals.handled(),
        pytest.raises(Interrupted, match="3 rows saved") as raised,
        signals.phase(lambda: "3 rows saved"),
    ):
        fail_after_a_signal(HALF_IMPORTED)
    assert raised.value.exit_code == 130
    assert isinstance(raised.value.__cause__, RecursionError)


def test_errors_with_a_cure_keep_their_text() -> None:
    with signals.handled(), pytest.raises(SetupError, match="the disk is full"), signals.phase(lambda: "saved"):
        fail_after_a_signal(SetupError("the disk is full"))


def test_a_command_that_fails_after_a_discarded_signal_ends_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Registry, "items", lambda _: fail_after_a_signal(HALF_IMPORTED))
    assert main(["list", "methods"]) == 130
    assert capsys.readouterr().err == f"{signals.AGAIN}\n"


def test_an_error_without_a_signal_stays_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise HALF_IMPORTED

    monkeypatch.setattr(Registry, "items", fail)
    assert main(["list", "methods"]) == 1
    assert "internal error, please report it: RecursionError: too deep" in capsys.readouterr().err
