"""The self-test passes what holds, and notices the absence of every single part of it."""

from __future__ import annotations

import pytest
from support.sandboxes import LOCKED, parts, without

from kvbench.scoring.sandbox import escapes, selftest
from kvbench.scoring.sandbox.inside import text
from kvbench.scoring.sandbox.selftest import PROBE_LIMITS
from kvbench.scoring.sandbox.syscalls import FAMILIES
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock, Tier, Unsafe

PARTS = [
    pytest.param(tier, part, id=f"{tier.name}: {part}")
    for tier in (Bwrap(), Landlock())
    if not tier.missing()
    for part in parts(tier.plan(PROBE_LIMITS))
]


@pytest.mark.parametrize("tier", LOCKED)
def test_what_works_here_passes(tier: Tier) -> None:
    report = selftest.selftest(tier)
    assert report.problems == ()
    assert len(report.digest) == 12
    assert selftest.selftest(tier).digest == report.digest


@pytest.mark.parametrize(("tier", "part"), PARTS)
def test_without_any_one_part_the_tier_is_refused(tier: Tier, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (escapes.CONTROL, escapes.TIME)  # they say nothing of a missing part
    monkeypatch.setattr(escapes, "INNER", tuple(probe for probe in escapes.INNER if probe not in slow))
    assert selftest.selftest(tier, plan=without(tier.plan(PROBE_LIMITS), part)).problems


def test_every_step_and_every_family_is_a_part() -> None:
    plan = Landlock().plan(PROBE_LIMITS)
    assert {f"seccomp {family}" for family in FAMILIES} < set(parts(plan))
    steps = {
        line.split("(")[0].removeprefix("def ") for line in text("lockdown").splitlines() if line.startswith("def ")
    }
    for name, _ in plan.inner:
        assert name in steps | {"seals"}


@pytest.mark.parametrize("tier", LOCKED)
def test_a_part_is_known_by_its_name(tier: Tier) -> None:
    plan = tier.plan(PROBE_LIMITS)
    assert len(set(parts(plan))) == len(parts(plan))
    with pytest.raises(AssertionError):
        without(plan, "no such part")


def test_resource_limits_alone_are_no_sandbox() -> None:
    found = "; ".join(selftest.selftest(Unsafe()).problems)
    for word in ("reads files", "network", "processes and signals", "system calls"):
        assert word in found


def test_a_tier_that_is_not_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert selftest.selftest(Bwrap()).problems == ("not installed",)
    monkeypatch.setattr("kvbench.scoring.sandbox.tiers._landlock_version", lambda: -1)
    assert selftest.selftest(Landlock()).problems == ("kernel has none",)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert selftest.selftest(Landlock()).problems == ("no system-call table for riscv64",)


def test_raw_calls_cover_every_family() -> None:
    assert {call[0] for call in escapes.raw_calls()} == {*FAMILIES, "newer"}
