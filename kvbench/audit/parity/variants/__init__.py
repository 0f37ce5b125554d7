"""Which kvbench method, options and budget stand for which variant of the reference code.

One file per family of variants turns a case's hyperparameters into plans. `VARIANTS` lists the functions, `REASONS`
says why other variants are not run. docs/parity.md explains the variants.
"""

from __future__ import annotations

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants import decode, kvzip, learned, other, snapkv
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants

__all__ = ["REASONS", "VARIANTS", "CasePlan", "NotCoveredError", "plans"]

VARIANTS: Variants = decode.VARIANTS | kvzip.VARIANTS | snapkv.VARIANTS | other.VARIANTS | learned.VARIANTS
REASONS = {("h2o", "h2o_mask_simulation"): "a mask simulation: nothing is dropped, hidden tokens come back"}


def plans(case: Case) -> list[CasePlan]:
    """Return the plans of a case. Raises NotCoveredError if the case is not run."""
    if not case.has_decisions:
        raise NotCoveredError("values without decisions")
    make = VARIANTS.get((case.method, case.variant))
    if make is None:
        reason = REASONS.get((case.method, case.variant)) or f"no method for {case.method!r} yet"
        raise NotCoveredError(reason)
    return make(case)
