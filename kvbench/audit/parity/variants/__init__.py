"""Says which kvbench method, options and budget repeat each variant of the reference code of the papers.

Each file turns the hyperparameters of a family of variants into plans. `REASONS` says why some variants are not run.
docs/parity.md lists the variants.
"""

from __future__ import annotations

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants import decode, kvzip, learned, other, recent, snapkv, valued
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants

__all__ = ["REASONS", "VARIANTS", "CasePlan", "NotCoveredError", "plans"]

VARIANTS: Variants = decode.VARIANTS | kvzip.VARIANTS | snapkv.VARIANTS | other.VARIANTS | learned.VARIANTS
VARIANTS |= valued.VARIANTS | recent.VARIANTS
REASONS = {("h2o", "h2o_mask_simulation"): "the reference drops no entry: it masks tokens, and masked tokens come back"}
REASONS |= recent.REASONS


def plans(case: Case) -> list[CasePlan]:
    """Return one or more plans, each of which repeats a case with kvbench. Raises NotCoveredError if kvbench cannot
    repeat the case."""
    if not case.has_decisions:
        raise NotCoveredError("the file holds computed numbers (for example losses), but no decisions to compare")
    if make := VARIANTS.get((case.method, case.variant)):
        return make(case)
    unknown = f"kvbench has no plan for the variant {case.variant!r} of {case.method!r} yet"
    raise NotCoveredError(REASONS.get((case.method, case.variant), unknown))
