"""What tests of ``kvbench audit`` share: a good method, and what fails of a method."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.audit.invariants import checks as audits
from kvbench.audit.invariants.subject import Subject
from kvbench.audit.outcome import Check
from kvbench.eviction.api import Method, Protect, ScoreOut
from kvbench.eviction.view import LayerView


def verdicts(method: Method, subject: Subject) -> tuple[set[str], list[Check]]:
    """Names of the invariants that fail, and those checks."""
    failed = [c for c in audits.audit([("mine", method)], [subject]) if c.verdict == "FAIL"]
    return {c.invariant for c in failed}, failed


def norms(view: LayerView) -> torch.Tensor:
    return view.keys.norm(dim=-1)


@dataclass(frozen=True)
class Good(Method):
    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        return norms(view)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=2, recent=4)
