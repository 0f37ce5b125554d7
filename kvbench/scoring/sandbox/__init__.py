"""Runs programs that a model wrote.

`tiers` locks them in, `selection` picks the strongest tier that works on this machine, `box` runs one program.

What never happens here: expected outputs do not enter the box, nothing is unpickled, and nothing a program printed is
taken for more than bytes.
"""

from kvbench.scoring.sandbox.box import Box, BoxError, Outcome
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.selection import Sandbox, choose, findings, require
from kvbench.scoring.sandbox.selftest import Report

__all__ = ["Box", "BoxError", "Limits", "Outcome", "Report", "Sandbox", "choose", "findings", "require"]
