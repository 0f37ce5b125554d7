"""Runs programs that a model wrote: see `kvbench.sandbox.tiers` for how they are locked in, `selection` for which way
is used, and `box` for how one is run.

What never happens here: expected outputs do not enter the box, nothing is unpickled, and nothing a program printed is
taken for more than bytes.
"""

from kvbench.sandbox.box import Box, BoxError, Outcome
from kvbench.sandbox.limits import Limits
from kvbench.sandbox.selection import Sandbox, choose, findings, require
from kvbench.sandbox.selftest import Report

__all__ = ["Box", "BoxError", "Limits", "Outcome", "Report", "Sandbox", "choose", "findings", "require"]
