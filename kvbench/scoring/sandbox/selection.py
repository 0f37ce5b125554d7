"""Choose the first tier that passes its self-test on this machine, in this process.

sandbox = choose()                   # SetupError where none works
with sandbox.box() as box: ...
require(unsafe=False)                # before a run that will need a sandbox
findings()                           # of every tier, for `kvbench doctor`
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.console import terminal
from kvbench.errors import SetupError
from kvbench.scoring.sandbox.box import Box, BoxError
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.selftest import SelfTest, selftest
from kvbench.scoring.sandbox.tiers import TIERS, Tier, Unsafe


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A tier that passed its self-test, or tier "none", and the digest of the self-test."""

    tier: Tier
    digest: str

    @contextlib.contextmanager
    def box(self, limits: Limits | None = None, packages: Sequence[str] = ()) -> Iterator[Box]:
        """A box for one program. Raises BoxError."""
        limits = limits or Limits()
        if not self.tier.shared:
            with Box(self.tier, limits, packages=packages) as box:
                yield box
            return
        key = (self.tier, limits, tuple(packages))
        if key not in _kept.boxes:
            _kept.boxes[key] = Box(self.tier, limits, packages=packages)
        try:
            yield _kept.boxes[key]
        except BoxError:
            _kept.boxes.pop(key).close()
            raise


class _Kept(threading.local):
    """Boxes that serve many programs in turn. They end with this process, which closes their drivers' input."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[Tier, Limits, tuple[str, ...]], Box] = {}


_kept = _Kept()


@functools.cache
def choose(unsafe: bool = False) -> Sandbox:
    """The first tier that works; with `unsafe`, resource limits alone where none does. Raises SetupError."""
    refused = []
    for kind in TIERS:
        tier = kind()
        report = selftest(tier)
        if not report.problems:
            return Sandbox(tier, report.digest)
        refused.append(report)
    if unsafe and not Unsafe().missing():
        return Sandbox(Unsafe(), "")
    reasons = "; ".join(f"{report.tier}: {report.problems[0]}" for report in refused)
    raise SetupError(
        f"no sandbox works here ({reasons}). Model-written programs are not run. Install bubblewrap, or pass "
        "--unsafe-run-code on a machine you can lose."
    )


def require(unsafe: bool = False) -> str:
    """Check before a run that programs can be run; returns the tier's name. Raises SetupError."""
    sandbox = choose(unsafe)
    if isinstance(sandbox.tier, Unsafe):
        terminal.warning(
            "no sandbox works here: model-written programs run with resource limits only and can do what you can do. "
            "Rows say sandbox_tier=none."
        )
    return sandbox.tier.name


def findings() -> list[SelfTest]:
    """The self-tests of all tiers, preferred ones first."""
    return [selftest(tier()) for tier in TIERS]
