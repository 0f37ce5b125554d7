"""Hostile programs: none gets out of a tier that works, and the audit notices those that get out of another."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.folders import DATA

from kvbench.audit.attacks import corpus as sandbox
from kvbench.audit.attacks import grader as attack_grader
from kvbench.audit.attacks.program import Attack, targets
from kvbench.audit.attacks.throughput import measure
from kvbench.cli.commands import audit_sandbox
from kvbench.errors import UserError
from kvbench.scoring.sandbox import SelfTest
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock

CORPUS = DATA / "attacks"
PROGRAMS = sandbox.read_corpus(CORPUS)
QUICK = [
    *("open/01_read_passwd.py", "open/04_proc_parent_environ.py", "open/10_posix_module_bypass.py"),
    *("open/11_tcp_loopback.py", "open/22_decompression_bomb.py", "open/25_kill_parent.py", "open/30_always_equal.py"),
    *("own/01_signal_by_owner.py", "own/03_memory_files.py", "own/04_abstract_datagram.py", "own/08_deep_tree.py"),
    *("own/12_forged_answers.py", "own/16_listen.py", "own/24_pipes_full.py", "own/25_installed_packages.py"),
]
TIER = next((tier for tier in (Landlock(), Bwrap()) if not tier.missing()), None)
needs_a_tier = pytest.mark.skipif(TIER is None, reason="no sandbox works here")


def _row(name: str, tier: str) -> dict[str, Any]:
    good = SelfTest(tier=tier, problems=(), digest="")
    (row,) = sandbox.audit({name: PROGRAMS[name]}, [good])
    return row


@needs_a_tier
@pytest.mark.parametrize("name", QUICK)
def test_blocked(name: str) -> None:
    assert TIER is not None
    row = _row(name, TIER.name)
    assert row["successes"] == [], row
    assert row["status_as_expected"], row


@pytest.mark.parametrize(
    ("name", "success"),
    [
        ("open/01_read_passwd.py", "leak"),
        ("open/08_delete_victim.py", "changed"),
        ("open/11_tcp_loopback.py", "net"),
        ("open/32_expected_from_disk.py", "leak"),
        ("own/05_sysv_residue.py", "residue"),
        ("own/16_listen.py", "listen"),
        ("own/27_exec.py", "marker"),
    ],
)
def test_noticed_where_nothing_isolates(name: str, success: str) -> None:
    assert success in _row(name, "none")["successes"]


@needs_a_tier
def test_the_process_adopts_orphans_only_while_programs_run() -> None:
    def adopts() -> bool:
        answer = ctypes.c_int()
        assert ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0) == 0  # PR_GET_CHILD_SUBREAPER
        return bool(answer.value)

    assert TIER is not None
    rows = sandbox.audit({QUICK[0]: PROGRAMS[QUICK[0]]}, [SelfTest(tier=TIER.name, problems=(), digest="")])
    next(rows)
    assert adopts()
    assert list(rows) == []
    assert not adopts()


def test_the_corpus() -> None:
    assert len(PROGRAMS) == 62
    with pytest.raises(UserError, match="holds no hostile programs"):
        sandbox.read_corpus(Path(__file__).parent / "..")
    with pytest.raises(ValueError, match="no header line '# class: VALUE'"):
        Attack.read("# id: x\nprint(1)\n", "x.py")
    checks = {check for name, text in PROGRAMS.items() for check in Attack.read(text, name).checks}
    assert checks >= {"leak", "net", "listen", "changed", "marker", "survivor", "verdict", "residue", "damage"}


def test_targets_are_put_away() -> None:
    with targets("5") as aims:
        folder = aims.folder
        assert not aims.changed()
        (folder / "victim/rows.parquet").write_text("x")
        assert aims.changed()
        assert aims.left() == []
        (aims.temporary / "x").write_text("x")
        assert aims.left() == ["x"]
    assert not folder.exists()
    assert aims.sentinel.poll() is not None


def test_a_broken_box_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Landlock, "command", lambda self, plan: ["/nonexistent"])
    limits = {"wall": 1.0, "mem": 1 << 29, "fsize": 1 << 20, "out": 1 << 20}
    done = attack_grader.run_program("print(1)", "stdio", [{"stdin": "", "expected": "1"}], limits, Landlock())
    assert (done["status"], done["passed"]) == ("sandbox_error", False)


@needs_a_tier
def test_how_fast() -> None:
    assert TIER is not None
    found = measure(TIER, programs=4, tests=5)
    assert (found["programs"], found["tests"]) == (4, 5)
    assert found["programs_seconds"] > 0


@needs_a_tier
def test_command(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PROGRAMS["open/03_env_tokens.py"])
    done = kvbench("audit", "--sandbox", str(tmp_path), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    users = {row["user"] for row in document["attacks"]}
    assert users == ({0, 65534} if os.geteuid() == 0 else {os.geteuid()})
    assert document["succeeded"] == 0
    assert {tier["tier"] for tier in document["tiers"]} == {"bwrap", "landlock", "container"}


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("not every attack ran as an ordinary user: denied", 1)])
def test_half_an_audit_is_no_success(
    error: str | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.py").write_text(PROGRAMS["open/03_env_tokens.py"])
    row = {"attack": "a", "class": "host-read", "tier": "bwrap", "status_as_expected": True, "successes": []}

    def as_ordinary_user(corpus: Any) -> Any:
        if error:
            raise OSError(error)
        yield row | {"user": 65534}

    monkeypatch.setattr(audit_sandbox, "findings", lambda: [SelfTest(tier="bwrap", problems=(), digest="")])
    monkeypatch.setattr(sandbox, "audit", lambda corpus, reports: iter([row | {"user": 0}]))
    monkeypatch.setattr(audit_sandbox, "_as_ordinary_user", as_ordinary_user)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert audit_sandbox.audit_sandbox(tmp_path, as_json=False, throughput=False, quiet=True) == code
    shown = capsys.readouterr()
    assert (error or "") in shown.err
    assert f"0 of {2 - code} attacks succeeded" in shown.out


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"attack": "open/x", "class": "host-read", "user": 0, "status": "time_limit", "status_as_expected": False}
    rows = [row | {"tier": "bwrap", "successes": []}, row | {"tier": "landlock", "successes": ["leak"]}]
    speed = {
        "tier": "bwrap",
        "workers": 2,
        "programs": 1000,
        "programs_seconds": 30.0,
        "tests": 200,
        "tests_seconds": 1.0,
    }
    document = {"attacks": rows, "succeeded": 1, "unexpected_statuses": 2, "not_checked": [], "throughput": [speed]}
    audit_sandbox._show(document, [SelfTest(tier="container", problems=("no docker or podman",), digest="")])
    shown = capsys.readouterr().out
    for text in ("blocked (time_limit)", "SUCCEEDED: leak", "container does not work here: no docker", "1000 programs"):
        assert text in shown
    assert "1 of 2 attacks succeeded; 2 ended with another status than their header states" in shown


def test_command_usage(kvbench: Callable[..., Any], tmp_path: Path) -> None:
    assert kvbench("audit", "--sandbox", str(tmp_path / "none")).code == 2
    assert kvbench("audit", "--sandbox", str(tmp_path)).code == 2
    assert kvbench("audit", "gkv", "--sandbox", str(tmp_path)).code == 2
    assert kvbench("audit", "--throughput").code == 2
