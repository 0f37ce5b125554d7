"""The invariant `effect`, which finds methods that ignore their budget."""

from __future__ import annotations

import torch

from kvbench.audit.invariants.exam import AuditLayout, Exam
from kvbench.audit.invariants.generation import takes_budget
from kvbench.audit.outcome import Broken


def effect(exam: Exam, layout: AuditLayout) -> None:
    """At the larger of two budgets a method keeps more entries than at the smaller, and some logits differ."""
    takes_budget(exam)
    trials = exam.two_budgets(layout)
    [request] = next(iter(trials.values())).requests
    budgets = "budgets " + " and ".join(map(str, trials))
    few, many = (trial.kept(request, 0) for trial in trials.values())
    for seen in sorted({seen for seen, _ in few} & {seen for seen, _ in many}):
        low, high = ([heads for at, heads in sorted(kept.items()) if at[0] == seen] for kept in (few, many))
        counts = [sum(len(head) for heads in layers for head in heads) for layers in (low, high)]
        if low == high:
            kept = f"the same {counts[0]} entries after {seen} tokens, entry by entry"
            raise Broken(f"{budgets} keep {kept}; the larger budget must keep more")
        if counts[0] >= counts[1]:
            kept = f"{counts[0]} and {counts[1]} entries after {seen} tokens"
            raise Broken(f"{budgets} keep {kept}; the larger budget must keep more")
    first, second = (trial.seen.logits for trial in trials.values())
    if all(torch.equal(logits, second[at]) for at, logits in first.items()):
        raise Broken(f"{budgets} give the same logits in all {len(first)} steps; the smaller must change some")
