"""Which tier is used, and what a user is told where none is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbench.errors import SetupError
from kvbench.scoring.sandbox import SelfTest, choose, findings, require, selection
from kvbench.scoring.sandbox.tiers import Bwrap, Container, Landlock, Tier


class Nothing(Tier):
    name = "bwrap"

    def missing(self) -> str:
        return "not installed"

    def plan(self, given, packages=()):
        raise NotImplementedError

    def command(self, plan):
        raise NotImplementedError


class NoKernel(Nothing):
    name = "landlock"

    def missing(self) -> str:
        return "kernel has none"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    choose.cache_clear()
    yield
    choose.cache_clear()


def _passes(name: str) -> object:
    return lambda tier, **_: SelfTest(
        tier=tier.name, problems=() if tier.name == name else ("does not hold",), digest=f"{tier.name}-ok"
    )


@pytest.mark.parametrize(("name", "kind"), [("bwrap", Bwrap), ("landlock", Landlock), ("container", Container)])
def test_the_first_that_passes(name: str, kind: type[Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "selftest", _passes(name))
    assert isinstance(choose().tier, kind)
    assert choose().digest == f"{name}-ok"
    assert require() == name


def test_none_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TIERS", (Nothing, NoKernel))
    with pytest.raises(SetupError) as error:
        require(unsafe=False)
    assert str(error.value) == (
        "no sandbox works here (bwrap: not installed; landlock: kernel has none). Model-written programs are not run. "
        "Install bubblewrap, or pass --unsafe-run-code on a machine you can lose."
    )
    assert error.value.exit_code == 3


def test_only_who_asks_runs_unsafe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selection, "TIERS", (Nothing,))
    for name in ("KVBENCH_UNSAFE_RUN_CODE", "KVBENCH_UNSAFE", "UNSAFE_RUN_CODE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SetupError):
        choose()
    assert require(unsafe=True) == "none"
    assert "warning: no sandbox works here" in capsys.readouterr().err
    assert choose(True).digest == ""


def test_unsafe_changes_nothing_where_a_sandbox_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection, "selftest", _passes("landlock"))
    assert require(unsafe=True) == "landlock"
    assert capsys.readouterr().err == ""


def test_findings_name_every_tier() -> None:
    assert [report.tier for report in findings()] == ["bwrap", "landlock", "container"]
