"""Choose the strongest tier that passes its self-test. Every process that runs programs runs the self-tests itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.console import terminal
from kvbench.errors import SetupError
from kvbench.scoring.sandbox.box import Box, BoxError
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.seccomp import CHILDREN
from kvbench.scoring.sandbox.selftest import SelfTest, selftest
from kvbench.scoring.sandbox.tiers import TIERS, Tier, Unsafe


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A tier (a way to isolate programs) that passed its self-test, with the test's digest.

    A Sandbox may also be the tier "none", which has no self-test; `digest` is then "".
    """

    tier: Tier
    digest: str

    @contextlib.contextmanager
    def box(self, packages: Sequence[str] = (), *, compiled: bool = False) -> Iterator[Box]:
        """Yield a box for one program. Raises BoxError. If one box of the tier serves many programs (`Tier.shared`),
        the box stays open for later programs. compiled: whether the program is a binary; the box then allows `exec`."""
        limits = Limits()
        plan = self.tier.plan(limits, packages)
        if compiled:
            plan = dataclasses.replace(plan, opened=frozenset({"exec"}))
        if not self.tier.shared:
            with Box(self.tier, limits, packages=packages, plan=plan) as box:
                yield box
            return
        key = (self.tier, tuple(packages), compiled)
        if key not in _kept.boxes:
            _kept.boxes[key] = Box(self.tier, limits, packages=packages, plan=plan)
        try:
            yield _kept.boxes[key]
        except BoxError:
            _kept.boxes.pop(key).close()
            raise

    @contextlib.contextmanager
    def compiler_box(self, tools: Sequence[str], limits: Limits) -> Iterator[Box]:
        """Yield a box for one run of a compiler: it may start processes and make files in its working directory.

        tools: the folders that it may read and execute. Raises BoxError.
        """
        if not self.tier.same_python:
            raise BoxError(f"the sandbox's tier {self.tier.name} has no compiler. Install bubblewrap")
        try:
            work = os.path.realpath(tempfile.mkdtemp(prefix="kvbench-compiler-"))
        except OSError as error:
            raise BoxError(f"the compiler gets no working directory: {error.strerror or error}") from None
        plan = dataclasses.replace(self.tier.plan(limits, tools=tools, work=work), opened=frozenset({"exec", CHILDREN}))
        with Box(self.tier, limits, plan=plan, folder=work) as box:
            yield box


class _Kept(threading.local):
    """The boxes that this thread keeps open for further programs.

    They end no later than this process: when it ends, their standard input closes.
    """

    def __init__(self) -> None:
        self.boxes: dict[tuple[Tier, tuple[str, ...], bool], Box] = {}


_kept = _Kept()


@functools.cache
def choose(unsafe: bool = False) -> Sandbox:
    """Return the strongest tier that works. Raises SetupError if no tier works. unsafe: if no tier works, but the tier
    "none" can run on this system, return the tier "none" instead."""
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
    """Return the name of the tier that will run programs; warn if it is "none". Raises SetupError as `choose` does."""
    sandbox = choose(unsafe)
    if isinstance(sandbox.tier, Unsafe):
        terminal.warning(
            "no sandbox works here: model-written programs run with resource limits only and can do what you can do. "
            "Rows say sandbox_tier=none."
        )
    return sandbox.tier.name


def findings() -> list[SelfTest]:
    """Run the self-tests of all tiers but "none" and return their results, strongest tier first."""
    return [selftest(tier()) for tier in TIERS]
