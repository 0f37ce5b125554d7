"""Tiers of the sandbox that can be tried on this machine, and one program in a box of theirs."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from kvbench.scoring.sandbox import Limits, Outcome, inside
from kvbench.scoring.sandbox.box import Box
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock, Tier

LOCKED = [
    pytest.param(tier, id=tier.name, marks=pytest.mark.skipif(bool(tier.missing()), reason=tier.missing()))
    for tier in (Bwrap(), Landlock())
]


def run(
    tier: Tier, program: str, stdin: bytes = b"", *, seconds: float = 10.0, limits: Limits | None = None, **options: Any
) -> Outcome:
    """One program as a script."""
    with Box(tier, limits or Limits()) as box:
        box.load(inside.text("script"), textwrap.dedent(program), options)
        return box.run(stdin, seconds=seconds)
