"""Run model-written programs in isolation. A tier (module `tiers`) is one way to isolate programs.

The tier "none" does not isolate. The module `selection` picks the strongest tier that works on this machine.

A box is a group of isolated processes: a driver and the programs that it starts. The module `box` controls it from
outside.

Expected outputs never enter a box. kvbench unpickles nothing that a box sends; a program's output stays bytes.
"""

from kvbench.scoring.sandbox.box import Box, BoxError, Outcome
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.selection import Sandbox, choose, findings, require
from kvbench.scoring.sandbox.selftest import SelfTest

__all__ = ["Box", "BoxError", "Limits", "Outcome", "Sandbox", "SelfTest", "choose", "findings", "require"]
